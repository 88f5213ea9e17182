"""Runs a function that imports torch in a single separate process."""

from collections.abc import Callable
from typing import Any

from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World

CPU = World(size=1, local_size=1, backend="gloo", device="cpu")


def run_alone(
    target: str,
    argument: Any,
    timeout_seconds: float,
    on_event: Callable[[Event], None],
    world: World = CPU,
    root: str = "",
) -> Any:
    """Returns target(environment, link, argument); raises as launcher.launch does."""
    return launcher.launch(target, world, argument, timeout_seconds, on_event, root=root)[0]
