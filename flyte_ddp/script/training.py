"""A script's ranks on this machine, around which all is as around any training."""

import copy
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from flyte_ddp.attempt.checkpoints import CheckpointStore, checkpoint_store
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.platform_training import Given, Outputs, Training
from flyte_ddp.attempt.pod import check_code
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.code.code_version import hash_parts, with_installed
from flyte_ddp.code.user_code import UserCode, find_observers, find_script
from flyte_ddp.engine.job import Job, Subject, TrainingResult
from flyte_ddp.errors import InputError
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.report.console import Remarks
from flyte_ddp.script.job import RANKS, ScriptJob, ScriptResult, ScriptSettings
from flyte_ddp.script.mirror import CheckpointMirror
from flyte_ddp.settings import RunOptions, TrainingSettings

CHECKPOINT = "checkpoints"  # the folder beside the report that has what the script left in $DDP_CHECKPOINT_DIR
# Options that mean nothing to a script
UNUSED = (
    "profile", "log_gradients", "keep_checkpoint", "keep_best", "sharding", "audit_every", "trace_every", "odd_hosts",
    "compile",
)  # fmt: skip


SECRET_NAME = re.compile(r"-.*(token|key|secret|password|passwd)$", re.IGNORECASE)


class ScriptTimeouts(Timeouts):
    """Limits for ranks of which nobody knows whether they step, evaluate or write, or wait for one another."""

    def are_hung(self, exceeded: Sequence[bool]) -> bool:
        return all(exceeded)

    def exceeded(self, phase: str) -> str:
        return (
            f"no collective, printed line or event for {self.seconds(phase):g} s "
            "(RunOptions.write_timeout_seconds, or start_timeout_seconds before the first one)"
        )


class CommonScriptTraining(Training[Given, Outputs]):
    """A script that torchrun could run, as a task. Only ranks run it, each in a process of its own.

    Attributes:
        script_arguments: the script's arguments.
        ranks: the ranks of one attempt, in the copy of the training that run() makes.
    """

    preload = ()
    is_script = True
    ranks: "Ranks"

    def __init__(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        data_files: Sequence[str] = (),
        observers: Sequence[str] = (),
    ):
        """Find the script. Create the object at the top level of the workflow file, after the imports.

        Args:
            script: the path of a Python file, looked for in the current folder and then in those of sys.path.
            arguments: the script's arguments, as a list of texts.
            data_files: files that the script reads, relative to its folder. They are shipped to the pods, as are the
                modules of its own that it imports.
            observers: names of classes, "package.module:Name", with a method for each event that concerns them; no part
                of the cache version.

        Raises:
            InputError: there is no such script, or the arguments are no list of texts.
        """
        self.script_arguments = check_arguments(arguments)
        code = find_script(script, data_files, [RANKS])
        version = hash_parts({"code": code.version, "arguments": json.dumps(self.script_arguments)})
        super().__init__(dataclasses.replace(code, version=version), find_observers(observers))

    def run(self, options: RunOptions = RunOptions(), arguments: Sequence[str] = ()) -> Outputs:  # type: ignore[override] # noqa: B008 frozen
        """Run the script with one process per rank on this host, and return the task's outputs.

        Args:
            options: how to run it.
            arguments: more arguments of the script, after those that the training has.

        Raises:
            InputError: the script cannot be run as asked.
            Exception: a rank has failed, or the script was stopped. On a cluster it is the platform's error for that.
        """
        this = self._begin(arguments)
        return super(CommonScriptTraining, this).run(this.describe().settings, options)

    def run_as_rank(self, options: RunOptions = RunOptions(), arguments: Sequence[str] = ()) -> Outputs | None:  # type: ignore[override] # noqa: B008 frozen
        """Run the script on many nodes, in processes that the platform has started; all ranks call it.

        The process of each node's first rank runs the script once for each rank of its node, and waits for the ends of
        all. In the processes of the other ranks, this method returns at once. Only the first node's checkpoints are
        mirrored to the storage. Each node begins with a copy of these checkpoints.

        Args:
            options: how to run it. nproc has no effect.
            arguments: more arguments of the script, after those that the training has.

        Returns:
            The task's outputs on rank 0; None on the other ranks.

        Raises:
            InputError: the script cannot be run as asked, or there are not as many ranks as registered.
            Exception: on a cluster, the platform's error for whatever ends the script.
        """
        this = self._begin(arguments)
        return super(CommonScriptTraining, this).run_as_rank(this.describe().settings, options)

    def _begin(self, arguments: Sequence[str]) -> "CommonScriptTraining[Given, Outputs]":
        """Return a copy of this training for one attempt, with more arguments."""
        this = copy.copy(self)
        this.script_arguments = (*self.script_arguments, *check_arguments(arguments))
        this.ranks = Ranks(self.platform, self.code, this.script_arguments)
        return this

    def describe(self) -> Subject:
        """Return the description of the script's run."""
        return describe_script(self.code, self.script_arguments)

    def check(self, settings: TrainingSettings, options: RunOptions) -> None:
        check_options(options)

    def most_ranks(self, settings: TrainingSettings) -> tuple[int, int]:
        return sys.maxsize, 0

    def subject(self, *_: Any, **__: Any) -> Subject:
        check_code(self.code.version)
        return self.describe()

    def launch_ranks(self, world: World, job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
        return self.ranks.start(world, job, on_event)

    def train_rank(
        self, environment: Environment, job: Job, on_event: Callable[[Event], None] | None
    ) -> list[TrainingResult]:
        """Run the script's ranks of this node, wait for them, and return their results, in the order of the ranks.

        The first rank of each node calls the method. The first node mirrors its checkpoints to the storage. On every
        other node the script works in a temporary folder, which is deleted at the end with all that the script has
        saved there. On a cluster this folder begins with a copy of what was mirrored; in a local run it begins empty.

        Args:
            environment: the node's first rank.
            job: the run.
            on_event: takes the events of rank 0; None on all nodes but the first.

        Raises:
            Exception: what launcher.launch raises, or a storage that does not deliver the checkpoints.
        """
        if on_event:
            return self.ranks.start(environment.world, job, on_event)
        given = job.options.resume, job.options.resume_from
        with tempfile.TemporaryDirectory() as folder:
            manifest = Path(folder, "checkpoint")
            if not self.platform.is_local():
                with checkpoint_store(self.platform, job.key, *given, is_by_ranks=True) as store:
                    if store.path.exists():
                        shutil.copyfile(store.path, manifest)
            job = dataclasses.replace(job, model_path=f"{folder}/model.pt", checkpoint_path=str(manifest), logs=folder)
            job = dataclasses.replace(job, storage=None)
            return self.ranks.start(environment.world, job, Remarks(), environment.rank)

    def make_outputs(self, trained: Trained) -> Outputs:
        return self.outputs(
            checkpoint=self.output_folder(trained.model.with_name(CHECKPOINT)),
            figures=cast(ScriptResult, trained.results[0]).figures,
            report=self.output_file(trained.report),
            logs=self.output_folder(trained.logs, trained.logs_url),
        )


class Ranks:
    """The ranks of one attempt on this host, and the folder of their checkpoints. They may be started several times."""

    def __init__(self, platform: Platform, code: UserCode, arguments: Sequence[str]):
        self._platform = platform
        self._code = code
        self._arguments = tuple(arguments)
        self._mirror: CheckpointMirror | None = None
        self._starts = 0

    def start(self, world: World, job: Job, on_event: Callable[[Event], None], first: int = 0) -> list[TrainingResult]:
        """Restore the checkpoints, run the ranks, mirror what they leave, and return their results by rank.

        The script writes checkpoints to the folder "script" beside the job's checkpoint_path. A local run without
        resume begins with an empty folder. If all ranks succeed, the folder is moved to CHECKPOINT beside the job's
        model_path. After a failure, the method may be called again: the ranks go on from what was mirrored.

        Args:
            world: all ranks.
            job: the run. Without its storage, nothing is mirrored.
            on_event: takes the events.
            first: the number of the first rank on this host.

        Raises:
            Exception: what launcher.launch raises, or a storage that does not deliver the checkpoints.
        """
        manifest = Path(job.checkpoint_path)
        folder = manifest.with_name("script")
        if not job.options.resume and self._platform.is_local():
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        storage = cast(CheckpointStore | None, job.storage)
        mirror = self._mirror = self._mirror or CheckpointMirror(self._platform, folder, manifest, storage)
        mirror.restore()
        lock = threading.Lock()

        def emit(event: Event) -> None:  # the mirror's thread has events, too
            if isinstance(event, StepLogged):
                mirror.step = event.step
                mirror.figures |= event.measures
            with lock:
                on_event(event)

        with tempfile.TemporaryDirectory() as ended:
            asked = make_script_job(job, self._code, self._arguments, folder, ended)
            asked = dataclasses.replace(asked, restarts=self._starts, first_step=mirror.step)
            self._starts += 1
            with mirror.following(emit, lambda is_stop: whole_until(Path(ended), world.local_size, is_stop)):
                results = launch(asked, world, emit, first)
        shutil.move(folder, Path(job.model_path).with_name(CHECKPOINT))
        return [dataclasses.replace(cast(ScriptResult, result), figures=mirror.figures) for result in results]


def whole_until(ended: Path, size: int, is_stop: bool) -> float:
    """Return a time: all checkpoints that the ranks have last changed before it are complete.

    Args:
        ended: the folder in which each rank whose script has come to its own end leaves a file.
        size: the number of ranks on this host.
        is_stop: whether the ranks were asked to stop.

    Returns:
        Nanoseconds since 1970. math.inf if all ranks have ended by themselves. After a request to stop, the time at
        which rank 0 has ended, if it has: other ranks may have been killed. Otherwise 0.0: no checkpoint is known to be
        complete.
    """
    if len(os.listdir(ended)) == size:
        return math.inf
    return (ended / "0").stat().st_mtime_ns if is_stop and (ended / "0").exists() else 0.0


def make_script_job(job: Job, code: UserCode, arguments: Sequence[str], folder: Path, ended: str) -> ScriptJob:
    """Return the job that the ranks of a script get.

    The script will run in this process's current folder, and its events go to events.jsonl in job.logs. Rank 0 will
    meet the other ranks at a port that is free now, and that nobody reserves. The new job has no storage.

    Args:
        job: the run.
        code: the script's code.
        arguments: the script's arguments.
        folder: the folder of its checkpoints.
        ended: an empty folder. Each rank leaves a file there if its script has come to its own end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ScriptJob(
        **{**vars(job), "storage": None},
        script=os.path.join(code.root, code.name),
        arguments=tuple(arguments),
        working_folder=os.getcwd(),
        checkpoint_folder=str(folder),
        events=str(Path(job.logs, "events.jsonl")),
        ended=ended,
        port=port,
    )


def launch(job: ScriptJob, world: World, on_event: Callable[[Event], None], first: int = 0) -> list[TrainingResult]:
    """Run a script's ranks on this host, and return their results by rank. Raises what launcher.launch raises."""
    options = job.options
    timeouts = ScriptTimeouts(options.write_timeout_seconds, options.start_timeout_seconds)
    return launcher.launch(f"{RANKS}:run", world, job, timeouts, on_event, preload=(), first=first)


def describe_script(code: UserCode, arguments: Sequence[str]) -> Subject:
    """Return the description of a script's run by its code and its arguments."""
    settings = cast(Any, ScriptSettings(script=code.name, arguments=shlex.join(without_secrets(arguments))))
    version = with_installed(code.version)
    return Subject(code.name, settings, version, Path(code.name).name, root=code.root, files=code.files)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a script's arguments with *** in place of secret values.

    A value is secret if it belongs to an option whose name ends in token, key, secret, password or passwd, such as
    --api_key. The value is the next argument, unless that begins with -, or what follows "=". Upper and lower case are
    alike.
    """
    shown: list[str] = []
    is_secret = False
    for argument in arguments:
        name, is_pair, _ = argument.partition("=")
        if is_secret and not argument.startswith("-"):
            argument = "***"
        is_secret = bool(SECRET_NAME.match(name))
        shown.append(f"{name}=***" if is_secret and is_pair else argument)
        is_secret = is_secret and not is_pair
    return shown


def check_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a script as a tuple. Raises InputError unless they are a list of texts."""
    if isinstance(arguments, (list, tuple)) and all(isinstance(one, str) for one in arguments):
        return tuple(arguments)
    parts = arguments.split() if isinstance(arguments, str) else arguments
    remedy = [str(one) for one in parts] if isinstance(parts, (list, tuple)) else ["--name", "value"]
    raise InputError(f"arguments must be a list of texts, got {arguments!r}: write them as in {remedy!r}")


def check_options(options: RunOptions) -> None:
    """Raise InputError if an option that has no effect on a script, one of UNUSED, is not its default."""
    for name in UNUSED:
        value, default = getattr(options, name), getattr(RunOptions(), name)
        if value != default:
            raise InputError(
                f"RunOptions.{name} must be {default!r} for a script, which it would have no effect on, got {value!r}: "
                "leave it out, or write a loop or a recipe"
            )
