"""A storage in memory that fails as often as it is told to, as object storages do when they are busy."""

from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class UnreliableStorage(MemoryFileSystem):
    """failures: how many of the next reads fail."""

    protocol = "unreliable"
    failures = 0

    def get(self, *arguments: Any, **options: Any) -> Any:
        if UnreliableStorage.failures:
            UnreliableStorage.failures -= 1
            raise RuntimeError("503 Slow Down")
        return super().get(*arguments, **options)


fsspec.register_implementation(UnreliableStorage.protocol, UnreliableStorage, clobber=True)
