"""Runs a packaged task as a cluster would: the very command of its container, with files for inputs and outputs."""

import functools
import hashlib
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import pytest
from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.literals_pb2 import Blob, BlobMetadata, KeyValuePair, Literal, LiteralMap, Scalar
from flyteidl.core.tasks_pb2 import Container, Resources, TaskTemplate
from flyteidl.core.types_pb2 import BlobType
from flytekit import FlyteContextManager
from flytekit.bin.entrypoint import execute_task_cmd
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.base_task import PythonTask
from flytekit.core.type_engine import TypeEngine
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict

from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.prepared.writer import write_prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.launch.environment import visible_gpus
from scripts.dry_run import ROOT, Package, build_package
from tests.once import digest, made_once

IMAGE = "registry.example/trainer:1"
TWO_NODES = {"DDP_PROFILE": "sandbox", "DDP_NNODES": "2", "DDP_NPROC_PER_NODE": "1", "DDP_JOIN_MINUTES": "5"}
# By their names in a pod template, in flytekit's order
RESOURCES = {
    "ephemeral-storage": Resources.EPHEMERAL_STORAGE, "cpu": Resources.CPU, "gpu": Resources.GPU,
    "memory": Resources.MEMORY,
}  # fmt: skip
MIDDLE = slice(6, 22)
LARGEST_SHARE = 0.8  # of the memory limit: other versions of torch want their part too
STORAGE_CLIENT = 90 * 2**20  # s3fs and botocore, measured: with paths of this machine flytekit leaves them alone
CORES = itertools.cycle(sorted(os.sched_getaffinity(0)))
PATIENCE_SECONDS = 300  # for what takes some 20 s: a test that fails should say so, instead of blocking all others


def registered(task: PythonTask) -> TaskTemplate:
    """What `pyflyte package` makes of a task of a module that the test has imported."""
    settings = SerializationSettings(ImageConfig.from_images(IMAGE, {"trainer": IMAGE}))
    template: TaskTemplate = get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()
    return template


@functools.cache
def package(*arguments: str, **environment: str) -> Package:
    """What `pyflyte package` makes of the workflows; for reading only."""

    def make(folder: Path) -> None:
        made = build_package(IMAGE, *arguments, environment=environment)
        (folder / "package.pickle").write_bytes(pickle.dumps(made))

    folder = made_once(f"package-{digest(arguments, sorted(environment.items()))}", make)
    found: Package = pickle.loads((folder / "package.pickle").read_bytes())
    return found


def package_for_here(**environment: str) -> Package:
    """For pods with the GPUs of this machine; with others they refuse to train; without any, that of two nodes."""
    gpus = visible_gpus()
    return package(**({"DDP_GPUS": str(gpus)} if gpus else TWO_NODES), **environment)


def literal(value: Any, kind: Any = None) -> Literal:
    kind = kind or type(value)
    return TypeEngine.to_literal(
        FlyteContextManager.current_context(), value, kind, TypeEngine.to_literal_type(kind)
    ).to_flyte_idl()


def small_dataset(folder: Path, cut: slice = slice(None)) -> Literal:
    """1,000 digits to train on, prepared, as an input.

    cut: of their rows and columns; of the middle, MIDDLE, the default network multiplies a tenth as often.
    """
    digits = prepare("digits")
    (images, labels), (test_images, test_labels) = (prepared.open_split(digits, split) for split in ("train", "test"))
    images, test_images = (given[..., cut, cut] for given in (images[:1000], test_images))
    names = [str(digit) for digit in range(10)]
    write_prepared(folder, "small", names, images, labels[:1000], test_images, test_labels)
    blob = Blob(uri=str(folder), metadata=BlobMetadata(type=BlobType(dimensionality=BlobType.MULTIPART)))
    return Literal(scalar=Scalar(blob=blob))


def is_whole(checkpoint: Path) -> bool:
    """Storage on a disk shows files while they are written, unlike S3."""
    content = checkpoint.read_bytes() if checkpoint.exists() else b""
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def container_of(task: TaskTemplate) -> Container:
    """The container that computes, also of a task with a pod template."""
    if not task.HasField("k8s_pod"):
        return task.container
    one = next(
        one
        for one in MessageToDict(task.k8s_pod.pod_spec)["containers"]
        if one["name"] == task.config.get("primary_container_name", "primary")
    )
    requests, limits = (
        [
            Resources.ResourceEntry(name=name, value=one["resources"][kind][key])
            for key, name in RESOURCES.items()
            if key in one["resources"][kind]
        ]
        for kind in ("requests", "limits")
    )
    return Container(
        image=one["image"],
        args=one["args"],
        env=[KeyValuePair(key=pair["name"], value=pair["value"]) for pair in one["env"] if "value" in pair],
        resources=Resources(requests=requests, limits=limits),
    )


class Pod:
    """One attempt at a task, in folders of its own."""

    def __init__(
        self,
        task: TaskTemplate,
        inputs: dict[str, Literal],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        previous: Optional["Pod"] = None,
        checkpoints: Path | None = None,
        cores: int = 0,
    ):
        self.task, self.folder = task, folder
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
        self.command = [values.get(argument, argument) for argument in container_of(task).args]
        if cores:  # others than those of the pod before, which may run beside this one
            mine = [next(CORES) for _ in range(cores)]
            program = f"import os, sys; os.sched_setaffinity(0, {mine}); os.execvp(sys.argv[1], sys.argv[1:])"
            self.command = [sys.executable, "-c", program, *self.command]
        # as in the image: the code is found by PYTHONPATH, and none of the registration's settings are there
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{variable.key: variable.value for variable in container_of(task).env},
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

    def run(self) -> dict[str, Literal]:
        """Waits for its success and returns the outputs."""
        return run_together(self)

    def run_here(self) -> dict[str, Literal]:
        """As run(), but as finish_here()."""
        self.finish_here()
        return self.outputs()

    def finish_here(self) -> None:
        """Runs the command in the test's process, which has imported flytekit and torch. Its memory isn't measured.

        Not for dynamic tasks: what they start would be as the test's process has imported it.
        """
        program, *arguments = self.command
        assert program == "pyflyte-execute"
        with (
            open(self.folder / "log", "w") as log, redirect_stdout(log), redirect_stderr(log),
            patch.dict(os.environ, self.environment, clear=True), pytest.MonkeyPatch.context() as here,
        ):  # fmt: skip
            here.chdir(tempfile.gettempdir())
            here.setattr(sys, "path", [*sys.path])  # to which the command appends
            execute_task_cmd.main(arguments, standalone_mode=False)

    def finish(self) -> int:
        """Waits for the end and returns the status, which is 0 for a task that failed: Flyte reads that from a file."""
        return finish(self)[0]

    def outputs(self) -> dict[str, Literal]:
        if (self.folder / "futures.pb").exists():  # a dynamic task's, which a cluster runs next
            return {}
        assert self.outputs_file.exists(), f"{self.log}\n{self.error}"
        return dict(LiteralMap.FromString(self.outputs_file.read_bytes()).literals)

    def kill_when(self, reached: Callable[[], bool]) -> None:
        """Starts, waits until something has come about, and kills all processes at once, as a lost machine does.

        They stand still while it is looked at again: a checkpoint that was whole may be half of the next one by then.
        """
        with self.running() as process:

            def has_reached() -> bool:
                if reached():
                    os.killpg(process.pid, signal.SIGSTOP)
                    if reached():
                        return True
                    os.killpg(process.pid, signal.SIGCONT)
                return False

            self.wait_until(has_reached, process)

    def wait_until(self, reached: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
        while not reached():
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
                raise AssertionError(self.log)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[str]"]:
        process = self.start()
        try:
            yield process
        finally:
            end(process)

    @property
    def logs(self) -> Path:
        return self.folder / "raw" / "logs"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def error(self) -> ErrorDocument:
        return ErrorDocument.FromString(self.errors_file.read_bytes() if self.errors_file.exists() else b"")


def run_together(*pods: Pod) -> dict[str, Literal]:
    """Starts all pods, waits for their success, and returns the outputs that one has."""
    assert finish(*pods) == [0] * len(pods), "\n".join(pod.log for pod in pods)
    return next((pod for pod in pods if pod.outputs_file.exists()), pods[0]).outputs()


def finish(*pods: Pod) -> list[int]:
    """Starts all pods and waits for their ends. One that takes more than LARGEST_SHARE of its memory is an error."""
    processes, peaks = [pod.start() for pod in pods], [0] * len(pods)
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        for process in processes:
            while process.poll() is None:
                assert time.monotonic() < deadline, "\n".join(pod.log for pod in pods)
                peaks = [
                    max(peak, memory_of(other.pid, most_of(pod.task)))
                    for pod, peak, other in zip(pods, peaks, processes, strict=True)
                ]
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
    finally:
        end(*processes)
    for pod, peak in zip(pods, peaks, strict=True):
        check_memory(pod.task, peak)
    return [process.returncode for process in processes]


def check_memory(task: TaskTemplate, peak: int) -> None:
    took = f"{(peak + STORAGE_CLIENT) / 2**20:.0f} MiB of {memory_limit(task)}"
    assert peak < most_of(task), f"{task.id.name} took {took}: a cluster kills it"


def most_of(task: TaskTemplate) -> float:
    """The bytes that its processes have to stay below."""
    text = memory_limit(task)
    limit = int(text[:-2]) * {"Mi": 2**20, "Gi": 2**30}[text[-2:]]
    return LARGEST_SHARE * limit - STORAGE_CLIENT


def memory_limit(task: TaskTemplate) -> str:
    (text,) = (entry.value for entry in container_of(task).resources.limits if entry.name == Resources.MEMORY)
    return str(text)


def memory_of(session: int, enough: float) -> int:
    """Bytes that a session's processes hold together: what is theirs, what they share once, and the largest one's pages
    of files, which a machine could do without for a while.

    What they share is counted for each of them while even that is below enough: to count it once takes 20 ms for each.
    """
    processes, held, files = [], 0, 0
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended since
            if os.getsid(int(place.name)) == session:
                status = (place / "status").read_text()
                anonymous, of_files, shared = (
                    sum(map(int, re.findall(rf"^Rss{kind}:\s+(\d+)", status, re.MULTILINE)))
                    for kind in ("Anon", "File", "Shmem")
                )
                processes.append(place)
                held += anonymous + shared
                files = max(files, of_files)
    if (held + files) * 1024 < enough:
        return (held + files) * 1024
    held = 0
    for place in processes:
        with suppress(OSError):
            parts = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", (place / "smaps_rollup").read_text(), re.MULTILINE)
            held += sum(map(int, parts))
    return (held + files) * 1024


def end(*processes: "subprocess.Popen[str]") -> None:
    """Leaves nothing of them behind."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
