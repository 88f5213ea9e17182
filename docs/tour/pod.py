"""Step 8: runs a task as its pod would, with the registered command and a folder in place of Flyte's storage."""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from flyte_ddp import RunOptions
from scripts.dry_run import build_package
from settings import Settings


def literal(value: Any) -> Literal:
    """The value as Flyte stores it."""
    context, kind = FlyteContextManager.current_context(), type(value)
    return TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()


def main(storage: Path) -> None:
    tasks = build_package("trainer:1", environment={"DDP_PROFILE": "sandbox"}, package="task", folder=Path.cwd()).tasks
    container = tasks["task.train_digits"].container
    print(*container.args, flush=True)
    inputs = {"settings": literal(Settings()), "options": literal(RunOptions(nproc=2))}
    (storage / "inputs.pb").write_bytes(LiteralMap(literals=inputs).SerializeToString())
    flyte_fills_in = {
        "{{.input}}": str(storage / "inputs.pb"),
        "{{.outputPrefix}}": str(storage),
        "{{.rawOutputDataPrefix}}": str(storage / "raw"),
        "{{.checkpointOutputPrefix}}": str(storage / "checkpoint"),
        "{{.prevCheckpointPrefix}}": '""',  # a first attempt
    }
    command = [flyte_fills_in.get(argument, argument) for argument in container.args]
    environment = {**os.environ, **{variable.key: variable.value for variable in container.env}}
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(Path(folder))
