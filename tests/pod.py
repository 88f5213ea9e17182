"""Runs a packaged task as a cluster would: the very command of its container, with files for inputs and outputs."""

import functools
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional

from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.literals_pb2 import Blob, BlobMetadata, Literal, LiteralMap, Scalar
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.types_pb2 import BlobType
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from scripts.dry_run import ROOT, Package, build_package
from workflows.training import prepared
from workflows.training.datasets import prepare

IMAGE = "registry.example/trainer:1"
PATIENCE_SECONDS = 300  # for what takes some 20 s: a test that fails should say so, instead of blocking all others


@functools.cache
def package(*arguments: str, **environment: str) -> Package:
    return build_package(IMAGE, *arguments, environment=environment)


def literal(value: Any, kind: Any = None) -> Literal:
    kind = kind or type(value)
    return TypeEngine.to_literal(
        FlyteContextManager.current_context(), value, kind, TypeEngine.to_literal_type(kind)
    ).to_flyte_idl()


def small_dataset(folder: Path) -> Literal:
    """1,000 digits to train on, prepared, as an input."""
    digits = prepare("digits")
    (images, labels), (test_images, test_labels) = (prepared.open_split(digits, split) for split in ("train", "test"))
    names = [str(digit) for digit in range(10)]
    prepared.write_prepared(folder, "small", names, images[:1000], labels[:1000], test_images, test_labels)
    blob = Blob(uri=str(folder), metadata=BlobMetadata(type=BlobType(dimensionality=BlobType.MULTIPART)))
    return Literal(scalar=Scalar(blob=blob))


def is_whole(checkpoint: Path) -> bool:
    """Storage on a disk shows files while they are written, unlike S3."""
    content = checkpoint.read_bytes() if checkpoint.exists() else b""
    return len(content) > 32 and hashlib.sha256(content[32:]).digest() == content[:32]


class Pod:
    """One attempt at a task, in folders of its own."""

    def __init__(
        self,
        task: TaskTemplate,
        inputs: Dict[str, Literal],
        folder: Path,
        environment: Optional[Mapping[str, str]] = None,
        previous: Optional["Pod"] = None,
        checkpoints: Optional[Path] = None,
        cores: int = 0,
    ):
        self.folder = folder
        # in Flyte the pods of one PyTorchJob have one place
        self.checkpoints = checkpoints or folder / "raw" / "_flytecheckpoints"
        self.outputs_file, self.errors_file = folder / "outputs.pb", folder / "error.pb"
        folder.mkdir(parents=True)
        (folder / "inputs.pb").write_bytes(LiteralMap(literals=inputs).SerializeToString())
        values = {
            "{{.input}}": str(folder / "inputs.pb"),
            "{{.outputPrefix}}": str(folder),
            "{{.rawOutputDataPrefix}}": str(folder / "raw"),
            "{{.checkpointOutputPrefix}}": str(self.checkpoints),
            "{{.prevCheckpointPrefix}}": str(previous.checkpoints) if previous else '""',
        }
        self.command = [values.get(argument, argument) for argument in task.container.args]
        if cores:
            mine = sorted(os.sched_getaffinity(0))[:cores]
            program = f"import os, sys; os.sched_setaffinity(0, {mine}); os.execvp(sys.argv[1], sys.argv[1:])"
            self.command = [sys.executable, "-c", program, *self.command]
        # as in the image: the code is found by PYTHONPATH, and none of the registration's settings are there
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{variable.key: variable.value for variable in task.container.env},
            **(environment or {}),
        }

    def start(self) -> "subprocess.Popen[str]":
        with open(self.folder / "log", "w") as log:
            return subprocess.Popen(
                self.command,
                cwd=tempfile.gettempdir(),
                env=self.environment,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def run(self) -> Dict[str, Literal]:
        """Waits for the end and returns the outputs."""
        return run_together(self)

    def outputs(self) -> Dict[str, Literal]:
        assert self.outputs_file.exists(), f"{self.log}\n{self.error}"
        return dict(LiteralMap.FromString(self.outputs_file.read_bytes()).literals)

    def kill_when(self, reached: Callable[[], bool]) -> None:
        """Starts, waits until something has come about, and kills all processes at once, as a lost machine does."""
        with self.running() as process:
            self.wait_until(reached, process)

    def wait_until(self, reached: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
        while not reached():
            assert process.poll() is None, self.log
            time.sleep(0.01)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[str]"]:
        process = self.start()
        try:
            yield process
        finally:
            end(process)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def error(self) -> ErrorDocument:
        return ErrorDocument.FromString(self.errors_file.read_bytes() if self.errors_file.exists() else b"")


def run_together(*pods: Pod) -> Dict[str, Literal]:
    """Starts all pods, waits for their ends and returns the outputs, which one of them has."""
    processes = [pod.start() for pod in pods]
    try:
        for process in processes:
            process.wait(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError("\n".join(pod.log for pod in pods)) from None
    finally:
        end(*processes)
    assert [process.returncode for process in processes] == [0] * len(pods), "\n".join(pod.log for pod in pods)
    return next((pod for pod in pods if pod.outputs_file.exists()), pods[0]).outputs()


def end(*processes: "subprocess.Popen[str]") -> None:
    """Leaves nothing of them behind."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
