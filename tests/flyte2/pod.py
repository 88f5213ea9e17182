"""Runs a task of Flyte 2 as a cluster would: the very command of its pod, as the SDK writes it, with object storage."""

import io
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from flyte import TaskTemplate
from flyte.models import CodeBundle, SerializationContext
from flyte.syncify import syncify
from flyte.types import TypeEngine
from flyteidl2.core.execution_pb2 import ErrorDocument
from flyteidl2.task.common_pb2 import Inputs, NamedLiteral, Outputs

from tests.commands import ROOT
from tests.object_storage import ObjectStorage

BUCKET = "s3://bucket"


def serialised(task: TaskTemplate, values: Mapping[str, Any]) -> bytes:
    """The inputs of a task as the backend stores them."""
    literals = []
    for name, (kind, default) in task.native_interface.inputs.items():
        value = values.get(name, default)
        convert = syncify(TypeEngine.to_literal)
        literals.append(NamedLiteral(name=name, value=convert(value, kind, TypeEngine.to_literal_type(kind))))
    return Inputs(literals=literals).SerializeToString()


def environment_of(task: TaskTemplate) -> dict[str, str]:
    found = task.parent_env() if task.parent_env else None
    assert found
    return {**(found.env_vars or {}), **(task.env_vars or {})}


class Pod2:
    """An attempt at an action: its first pod, or the one after a kill, which has the same arguments."""

    def __init__(
        self,
        task: TaskTemplate,
        values: Mapping[str, Any],
        storage: ObjectStorage,
        number: int = 1,
        action: str = "train",
        environment: Mapping[str, str] = {},
        code: str = "",
    ):
        """code: the URL of the archive with the code; without it, the code is this checkout's."""
        self.task, self.storage, self.name = task, storage, f"bucket/run/{action}"
        self.folder = f"{self.name}/{number}"
        storage.objects[f"{self.name}/inputs.pb"] = serialised(task, values)
        bundle = CodeBundle(computed_version="v1", tgz=code) if code else None
        context = SerializationContext(version="v1", root_dir=ROOT, code_bundle=bundle)
        before = f"s3://{self.name}/{number - 1}/_flytecheckpoints" if number > 1 else '""'
        given = {
            "{{.input}}": f"s3://{self.name}/inputs.pb",
            "{{.outputPrefix}}": f"s3://{self.folder}",
            "{{.rawOutputDataPrefix}}": f"s3://{self.folder}/raw",
            "{{.checkpointOutputPrefix}}": f"s3://{self.folder}/_flytecheckpoints",
            "{{.prevCheckpointPrefix}}": before,
            "{{.runName}}": "run",
            "{{.actionName}}": action,
        }
        self.command = [given.get(argument, argument) for argument in task.container_args(context)]
        self.environment = {
            **storage.environment,
            **environment_of(task),
            "_U_RUN_BASE": f"{BUCKET}/run",
            "_U_ORG_NAME": "me",
            "FLYTE_ATTEMPT_NUMBER": str(number - 1),
            "FLYTE_INTERNAL_EXECUTION_ID": "run",
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
            **environment,
        }
        self.before: list[str] = []  # what starts the command
        self.log_file = Path(tempfile.mkdtemp(), "log")

    def start(self) -> "subprocess.Popen[str]":
        with open(self.log_file, "w") as log:
            return subprocess.Popen(
                [*self.before, *self.command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[str]"]:
        process = self.start()
        try:
            yield process
        finally:
            self.end(process)
            process.wait()

    def end(self, process: "subprocess.Popen[str]") -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def finish(self, timeout: float = 300) -> int:
        with self.running() as process:
            return process.wait(timeout)

    def kill_when(self, reached: Callable[[dict[str, bytes]], bool]) -> None:
        """Ends all its processes at once, as soon as something is in the storage."""
        with self.running() as process:
            while not reached(dict(self.storage.objects)):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.01)
                    raise AssertionError(self.log)

    def outputs(self) -> Any:
        """Those of a task with a single one."""
        content = self.storage.objects.get(f"{self.folder}/outputs.pb")
        assert content, f"{self.log}\n{self.error}"
        (output,) = Outputs.FromString(content).literals
        (kind,) = self.task.native_interface.outputs.values()
        return syncify(TypeEngine.to_python_value)(output.value, kind)

    @property
    def error(self) -> ErrorDocument:
        return ErrorDocument.FromString(self.storage.objects.get(f"{self.folder}/error.pb", b""))

    @property
    def log(self) -> str:
        return self.log_file.read_text()


def weights(storage: ObjectStorage, outputs: Any) -> dict[str, torch.Tensor]:
    """Of a training, from the storage."""
    content = storage.objects[outputs.model_state.path.removeprefix("s3://")]
    found: dict[str, torch.Tensor] = torch.load(io.BytesIO(content), weights_only=True)
    return found
