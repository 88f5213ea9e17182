"""The private parts of flytekit that this package touches, read from version 1.16.31: see tests/test_compat.py."""

from contextlib import contextmanager
from typing import Any, Callable, Iterator, MutableMapping, Optional, Sequence, Type, TypeVar

import click
from flytekit import Deck, PythonFunctionTask
from flytekit.core.base_task import TaskMetadata
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.local_cache import LocalTaskCache
from flytekit.exceptions.base import FlyteException
from flytekit.interaction.click_types import JsonParamType, UnionParamType

E = TypeVar("E", bound=Type[FlyteException])


def read_json_inputs(kind: type, read: Callable[[str], Any]) -> None:
    """Has `pyflyte run` read the text of inputs of a kind, subclasses included, by a function of ours.

    JsonParamType._parse is the one place that text passes before flytekit takes it for JSON or a path.
    """
    # set up twice, it is not wrapped twice
    flytekits = getattr(JsonParamType._parse, "flytekits", JsonParamType._parse)

    def parse(self: JsonParamType, value: Any, param: Any) -> Any:
        ours = isinstance(self._python_type, type) and issubclass(self._python_type, kind)
        return read(value) if ours and isinstance(value, str) else flytekits(self, value, param)

    parse.flytekits = flytekits  # type: ignore[attr-defined]
    JsonParamType._parse = parse


def alternatives(parameter: UnionParamType) -> Sequence[click.ParamType]:
    """What an input that may be one of several is tried as. Flytekit has no public name for it."""
    return list(parameter._types)


def local_cache() -> MutableMapping[str, bytes]:
    """The local cache by key; a value is a serialised LiteralMap. LocalTaskCache itself can neither list nor forget."""
    LocalTaskCache.initialize()
    cache: MutableMapping[str, bytes] = LocalTaskCache._cache
    return cache


def checkpoint_destination(checkpoint: SyncCheckpoint) -> str:
    """Where this attempt's checkpoint goes. The class can read from the attempt before alone, not what it has saved."""
    return str(checkpoint._checkpoint_dest)


def checkpoint_source(checkpoint: SyncCheckpoint) -> Optional[str]:
    """Where the attempt before left its checkpoint; None for the first. The class tells only that there is one."""
    source: Optional[str] = checkpoint._checkpoint_src
    return source


def replace_html(deck: Deck, html: str) -> None:
    """Puts HTML in the place of what a Deck has. By its own methods it can only grow."""
    deck._html = html


def with_error_code_of(other: Type[FlyteException]) -> Callable[[E], E]:
    """Decorates an exception that Flyte shall know by the error code of another; a subclass inherits it.

    The public error_code is a property that reads _ERROR_CODE.
    """

    def decorate(own: E) -> E:
        own._ERROR_CODE = other.error_code
        return own

    return decorate


@contextmanager
def metadata_of(task: PythonFunctionTask, metadata: TaskMetadata) -> Iterator[None]:
    """Gives a task other metadata while the block runs: a task has them from its decorator, for good."""
    registered = task.metadata
    task._metadata = metadata
    try:
        yield
    finally:
        task._metadata = registered
