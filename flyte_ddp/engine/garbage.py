"""Python's garbage collection during training: at the same time on all ranks."""

import gc
from collections.abc import Generator, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def collect_garbage_between(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items, and collect Python's young garbage after each item, which takes microseconds.

    Automatic collection is off until the items end, or the generator is closed.
    """
    # With automatic collection each rank would stop at a step of its own, and the others would wait for it each time
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for item in items:
            yield item
            gc.collect(1)
    finally:
        if was_enabled:
            gc.enable()
