"""The parent's side, which starts the training processes and receives their events."""

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flyte_ddp.code.user_code import find_code
from flyte_ddp.events import EpochFinished, Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.report.console import Remarks, say
from mirrored.job import Job, Result
from mirrored.settings import Hyperparameters

CODE = find_code("mirrored.training:run")  # a name, because importing it would import TensorFlow
TIMEOUT_SECONDS = 300.0  # a run without a step for so long counts as hung


class Console(Remarks):
    """An observer that prints a line per epoch."""

    def __init__(self, epochs: int):
        self._epochs = epochs

    def on_epoch_finished(self, event: EpochFinished) -> None:
        say(
            f"Epoch {event.epoch + 1} of {self._epochs}: test accuracy {event.test['accuracy']:.2%}, "
            f"test loss {event.test['loss']:.4f}, {event.train_seconds:.2f} s of training"
        )


def train(
    hp: Hyperparameters, model: Path, checkpoint: Path, listen: Callable[[Event], None] = lambda event: None
) -> Result:
    """Train in hp.processes processes, and return the first one's result. Raises what launcher.launch raises.

    Args:
        hp: what to train.
        model: where the trained network is written.
        checkpoint: where the checkpoint is, or will be.
        listen: receives each event of the training.
    """
    console = Console(hp.epochs)

    def on_event(event: Event) -> None:
        console(event)
        listen(event)

    world = World(hp.processes, hp.processes, backend="", device="")  # TensorFlow decides both
    with free_ports(hp.processes if hp.strategy == "multi_worker" else 0) as ports:
        job = Job(hp, ports, str(model), str(checkpoint))
        results = launcher.launch(CODE.name, world, job, TIMEOUT_SECONDS, on_event, preload=(), root=CODE.root)
    return results[0]


@contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Yield ports of 127.0.0.1 that no other process is given while the block runs.

    They are bound but not listened on. On Linux a worker can bind them anyway, because gRPC sets SO_REUSEADDR, too.
    Elsewhere a worker could not, so they are released at once.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
        if sys.platform != "linux":
            held.close()
        yield ports
