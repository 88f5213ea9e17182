"""Python's garbage collection in the steps of a training: at the same time on all ranks."""

import gc
from collections.abc import Generator, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def collected_between(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The items, which come one for each step. What is young is collected between them, which takes microseconds, and
    nothing else is, or each rank would stop at a step of its own, and all others wait for it each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for item in items:
            yield item
            gc.collect(1)
    finally:
        if was_enabled:
            gc.enable()
