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
    """Run target(environment, link, argument) in a process of its own, wait for it, and return its value.

    When this function returns or raises, the process has ended.

    Args:
        target: the function's name, "module:function". Only the new process imports the module.
        argument: the object that the target gets; it is pickled.
        timeouts: how long the process may be silent before it counts as hung: the limits in a RunOptions, or seconds.
        on_event: called in this thread for each event of the process, and for each line that it prints.
        world: a world of one rank, by default on the CPU.
        root: a folder that comes first on the process's sys.path; empty for none.

    Raises:
        RankError: the process has failed or hangs; a RecoverableRankError if another attempt may succeed.
        InputError: the target raised one.
        PreemptedError: a SIGTERM or SIGHUP arrived.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    return launcher.launch(target, world, argument, timeouts, on_event, root=root)[0]
