"""A rank of benchmarks.hangs --nodes, started by torchrun; leaves in a folder how far it is and what it fails with."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_rows.fault_settings import Settings
from benchmarks.gpu_rows.training import FAULTY
from flyte_ddp import training
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    given = json.loads(sys.argv[2])

    def note(event: Event) -> None:
        if isinstance(event, StepLogged):
            (folder / f"step-{event.step}").touch()

    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    options = RunOptions(checkpoint_seconds=86400, timeout_seconds=given.pop("timeout_seconds"))
    try:
        training.train(FAULTY, Settings(**given), options, output=folder / "trained", on_event=note)
    except RankError as failed:
        (folder / f"{rank}.part").write_text(json.dumps(asdict(failed.failure)))
        (folder / f"{rank}.part").rename(folder / f"failure-{rank}")
        raise


if __name__ == "__main__":
    main()
