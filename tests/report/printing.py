"""A worker that prints and warns."""

import gc
import sys
import warnings
from typing import Any

from flyte_ddp.launch.environment import Environment


class Finalized:
    """Prints whenever the garbage collector finds it, be it while its rank prints."""

    def __init__(self) -> None:
        self.itself: Any = self

    def __del__(self) -> None:
        print("finalized")


def run(environment: Environment, *_: Any) -> None:
    print(f"printed by {environment.rank}\nin two", end=" ")
    print("lines")
    warnings.warn("mind this", stacklevel=1)
    gc.set_threshold(1)
    for _turn in range(200):
        Finalized()
        print("made")
    gc.collect()
    sys.stdout.buffer.write(b"the last one")
