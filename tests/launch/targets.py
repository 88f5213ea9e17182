"""What tests have ranks do: each function is a worker's."""

import fcntl
import gc
import itertools
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine import sums, worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.readback import Readback
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event, Printed, RunStarted, StepLogged
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import STEPPING, WRITING
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipes.images import ImageClassifier


def report_rank(environment: Environment, link: Link, argument: Any) -> Any:
    return environment.rank, environment.world.size, environment.threads, argument


def read_variable(environment: Environment, link: Link, name: str) -> str | None:
    return os.environ.get(name)


def count_frozen(environment: Environment, link: Link, argument: Any) -> tuple[bool, int]:
    return gc.isenabled(), gc.get_freeze_count()


def list_modules(environment: Environment, link: Link, job: Job) -> list[str]:
    worker.run(environment, link, job)
    return list(sys.modules)


def count_page_faults(environment: Environment, link: Link, job: Job) -> list[int]:
    """Trains; for each sign of life but the first, the page faults since the one before."""
    counts: list[int] = []

    class CountingLink(Link):
        def heartbeat(self, phase: str = STEPPING) -> None:
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    worker.run(environment, CountingLink(link.is_heard), job)
    return [after - before for before, after in itertools.pairwise(counts)]


def stop_as_rank_one_is_asked_to(environment: Environment, link: Link, argument: Any) -> None:
    """Sends SIGTERM to rank 1 alone; all ranks stop then, as they do after their next step."""
    if environment.rank == 1:
        signal.raise_signal(signal.SIGTERM)
        assert link.stop_requested
    raise StopRequested(epoch=0, step=4)


def fail_on_rank_one(environment: Environment, link: Link, argument: Any) -> None:
    with process_group(environment, 60):
        if environment.rank == 1:
            raise LookupError("no such word: " + argument)
        distributed.barrier()


def return_on_rank_one(environment: Environment, link: Link, argument: Any) -> None:
    with process_group(environment, 60):
        if environment.rank != 1:
            distributed.barrier()


def die_on_rank_one(environment: Environment, link: Link, argument: Any) -> None:
    with process_group(environment, 60):
        if environment.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()


def log_in_children(environment: Environment, link: Link, words: str) -> None:
    """Its loader workers, say, have the logging handler of the rank, and use it at once."""
    logger = logging.getLogger("children")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    children = [os.fork() for _ in range(2)]
    for _ in range(100):
        logger.warning(words)
    if 0 in children:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def die_while_sending(environment: Environment, link: Link, fifo: str) -> None:
    """The first bytes of a message come, and no more; a child lives on."""
    if os.fork() == 0:
        with open(fifo) as file:
            file.read()
        os._exit(0)
    os.write(cast(Any, link)._connection.fileno(), struct.pack("!i", 1000) + b"of which these")
    os.kill(os.getpid(), signal.SIGKILL)


def stop_while_sending(environment: Environment, link: Link, argument: Any) -> None:
    """Stops this process while the pipe has a part of a message; the parent, told of the process, does not read."""
    pipe = cast(Any, link)._connection.fileno()

    def stop() -> None:
        while struct.unpack("i", fcntl.ioctl(pipe, termios.TIOCOUTQ, bytes(4)))[0] < 50_000:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()
    for text in (str(os.getpid()), "x" * 2_000_000):
        link.emit(Printed(0, text))


def hang_on_rank_one(environment: Environment, link: Link, argument: Any) -> None:
    with process_group(environment, 60):
        link.heartbeat()
        if environment.rank == 1:
            for _ in range(80):  # their stacks come first, and take time to write
                threading.Thread(target=wait_deep_down, args=(90,), daemon=True).start()
            wait_for_ever()
        distributed.barrier()


def wait_deep_down(frames: int) -> None:
    if frames:
        wait_deep_down(frames - 1)
    threading.Event().wait()


def wait_for_ever() -> None:
    threading.Event().wait()


def print_while_rank_one_fails(environment: Environment, link: Link, fifo: str) -> None:
    """Rank 1 fails once the parent has seen a line."""
    if environment.rank == 1:
        with open(fifo) as file:
            raise LookupError(file.read())
    for _ in range(5_000):
        print("on and on")


def wait_for_parent(environment: Environment, link: Link, fifo: str) -> str:
    """What the parent writes when it has dealt with an event."""
    link.emit(CheckpointFailed("a busy parent"))
    with open(fifo) as file:
        return file.read()


def take_time(environment: Environment, link: Link, seconds: float) -> str:
    """To start, and to write; there is a step in between."""
    threading.Event().wait(seconds)
    link.heartbeat()
    link.heartbeat(WRITING)
    threading.Event().wait(seconds)
    return "done"


def hang_in(environment: Environment, link: Link, phase: str) -> None:
    link.heartbeat()
    link.heartbeat(phase)
    wait_for_ever()


def hang_beside_eight_gpus(environment: Environment, link: Link, argument: Any) -> None:
    """Says which of the GPUs is asked whether it is idle; torch has none."""

    def default_stream(number: int) -> Any:
        print("GPU", number)
        return SimpleNamespace(query=lambda: True)

    distributed.init_process_group("gloo", init_method=environment.init_method, rank=0, world_size=1)
    vars(torch.cuda).update(is_initialized=lambda: True, device_count=lambda: 8, default_stream=default_stream)
    hang_in(environment, link, STEPPING)


def say_pids_and_wait(environment: Environment, link: Link, argument: Any) -> None:
    """Every rank writes its process id to a file; rank 0 emits an event when all have; then they wait, and a process of
    their own with them."""
    with process_group(environment, 60):
        subprocess.Popen(["sleep", "600"])
        with open(os.path.join(argument, str(environment.rank)), "w") as file:
            file.write(str(os.getpid()))
        distributed.barrier()
        link.emit(CheckpointFailed("all are waiting"))
        wait_for_ever()


def train_on_a_full_disk(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains with a limit on the size of any file, which is what a full disk looks like to a writer."""
    size = 350_000  # bytes; the model has 230 kB, a checkpoint with its momenta 450 kB
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return worker.run(environment, link, job)


def train_on_two_hosts(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains where only rank 0 sees its disk."""
    elsewhere = replace(job, model_path="", checkpoint_path="", logs="")
    return worker.run(environment, link, elsewhere if environment.rank else job)


def break_gradient_of_rank_one(environment: Environment, link: Link, job: Job) -> None:
    """Trains a network whose gradient, not its loss, becomes NaN in the eighth step on rank 1."""
    worker.run(environment, link, replace(job, recipe="tests.launch.targets:BrokenOnRankOne"))


class BrokenOnRankOne(ImageClassifier):
    def model(self) -> nn.Module:
        model = super().model()
        forwards = itertools.count(1)

        def add_broken(module: nn.Module, inputs: Any, scores: Tensor) -> Tensor:
            # the derivative of a square root at 0 is infinite, and times 0 it is NaN
            is_step = not self.share.alone  # but a look before the training
            is_broken = distributed.get_rank() == 1 and is_step and next(forwards) >= 8
            return scores + (0 * scores).sqrt() if is_broken else scores

        model.register_forward_hook(add_broken)
        return model


def behind(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Trains as on a device that the host is ahead of, by three steps."""

    class Behind(Readback):
        def __init__(self, device: torch.device):
            super().__init__(device)
            self.behind = 3
            made.append(self)

    made: list[Readback] = []
    vars(sums)["Readback"] = Behind
    result = worker.run(environment, link, job)
    assert made, "the engine reads by another class: nothing was behind"
    return result


def fail_to_restore(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Rank 1 alone cannot load the checkpoint's state."""

    def load_state_dict(state: TrainingState, saved: dict[str, Any]) -> None:
        raise RuntimeError("no room")

    if environment.rank == 1:
        TrainingState.load_state_dict = load_state_dict  # type: ignore
    return worker.run(environment, link, job)


def stop_while_behind(environment: Environment, link: Link, job: Job) -> tuple[int, int]:
    """As behind; rank 0 is asked to stop in its seventh step. Returns where all do."""
    signs = itertools.count(1)

    class Stopping(Link):
        def heartbeat(self, phase: str = STEPPING) -> None:
            self.stop_requested = next(signs) >= 7

    asked = Stopping(link.is_heard) if environment.rank == 0 else Link()
    vars(asked)["emit"] = link.emit
    try:
        behind(environment, asked, job)
    except StopRequested as stopped:
        return stopped.epoch, stopped.step
    raise AssertionError("not stopped")


def break_gradient_while_behind(environment: Environment, link: Link, job: Job) -> None:
    behind(environment, link, replace(job, recipe="tests.launch.targets:BrokenOnRankOne"))


def stop_after_the_fifth_step(environment: Environment, link: Link, job: Job) -> tuple[int, int]:
    """Asks rank 0 to stop once step 4 is logged, so that all ranks stop after the next; returns where."""
    emit = link.emit

    def emit_and_ask(event: Event) -> None:
        emit(event)
        if isinstance(event, StepLogged) and event.step == 4:
            link.stop_requested = True

    vars(link)["emit"] = emit_and_ask
    try:
        worker.run(environment, link, job)
    except StopRequested as stopped:
        return stopped.epoch, stopped.step
    raise AssertionError("not stopped")


def ignore_the_notice(environment: Environment, link: Link, phase: str) -> None:
    """Has its first steps, and two checkpoints, behind it; then does something without end."""
    link.emit(started(first_epoch=1))
    link.emit(CheckpointWritten(epoch=1, step=4, path="", stall_seconds=0.0, write_seconds=50.0))
    link.heartbeat(phase)
    link.emit(CheckpointFailed("go on"))
    wait_for_ever()


def save_when_asked_to_stop(environment: Environment, link: Link, argument: Any) -> str:
    print("here")
    while not link.stop_requested:
        threading.Event().wait(0.01)
    return "saved"


def die_when_asked_to_stop(environment: Environment, link: Link, argument: Any) -> None:
    link.emit(started())
    save_when_asked_to_stop(environment, link, argument)
    os.kill(os.getpid(), signal.SIGKILL)


def write_until_told(environment: Environment, link: Link, file: str) -> str:
    link.emit(started())
    link.heartbeat(WRITING)
    while not os.path.exists(file):
        print("still writing")
        threading.Event().wait(0.05)
    return "written"


def started(first_epoch: int = 0) -> RunStarted:
    """Return what is told before the first step."""
    return RunStarted("", "", "", (), 0, 0, 0, 1, "gloo", "cpu", "", 2, 10, first_epoch, 0, 0.0, [])
