"""A single separate process for a function that imports torch."""

from collections.abc import Callable
from typing import Any

from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.settings import RunOptions

CPU = World(size=1, local_size=1, backend="gloo", device="cpu")


def run_alone(
    target: str,
    argument: Any,
    timeouts: RunOptions | float,
    on_event: Callable[[Event], None],
    world: World = CPU,
    root: str = "",
) -> Any:
    """Return target(environment, link, argument), called in a process of its own.

    The parameters and errors are those of launcher.launch; world has one rank, by default on the CPU.
    """
    return launcher.launch(target, world, argument, timeouts, on_event, root=root)[0]
