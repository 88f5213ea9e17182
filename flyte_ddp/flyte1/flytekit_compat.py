"""The private parts of flytekit that this package uses, as of version 1.16.31; tests/compat tests them."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from flytekit import Deck, PythonFunctionTask
from flytekit.core.base_task import TaskMetadata
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.local_cache import LocalTaskCache
from flytekit.exceptions.base import FlyteException
from flytekit.interaction.click_types import JsonParamType, UnionParamType
from flytekit.models.literals import Literal


def get_python_type(option: click.ParamType) -> Any:
    """Return the Python type that an option of JSON is converted to; None for other options."""
    return option._python_type if isinstance(option, JsonParamType) else None


def read_json_inputs(kind: type, read: Callable[[str], Any]) -> None:
    """Patch `pyflyte run` so that `read` parses the text of inputs of this class and its subclasses.

    The patch lasts as long as the process. A second call replaces the first one's patch, even for another class.
    flytekit still parses all other inputs.

    Args:
        kind: the class of the inputs.
        read: takes the text, which is JSON or the path of a file, and returns what it says, such as a dict.
    """
    # A second call must not wrap the function again
    flytekits = getattr(JsonParamType._parse, "flytekits", JsonParamType._parse)

    def parse(self: JsonParamType, value: Any, param: Any) -> Any:
        ours = isinstance(self._python_type, type) and issubclass(self._python_type, kind)
        return read(value) if ours and isinstance(value, str) else flytekits(self, value, param)

    parse.flytekits = flytekits  # type: ignore[attr-defined]
    JsonParamType._parse = parse


def alternatives(parameter: UnionParamType) -> Sequence[click.ParamType]:
    """Return the types that a union input is tried as, in order. Flytekit has no public name for them."""
    return list(parameter._types)


def local_cache() -> MutableMapping[str, bytes]:
    """Return the local cache: serialised LiteralMaps by key, which begins with the task's name.

    Changes of the mapping are changes of the cache. LocalTaskCache itself cannot list or delete entries.
    """
    LocalTaskCache.initialize()
    cache: MutableMapping[str, bytes] = LocalTaskCache._cache
    return cache


def on_cache_hit(callback: Callable[[Mapping[str, Literal]], None]) -> None:
    """Patch flytekit to call `callback` whenever a local run takes a task's outputs from its cache.

    The patch lasts as long as the process, because flytekit has no hook for that. A second call of this function
    replaces the first one's callback.

    Args:
        callback: gets the task's outputs by name.
    """
    flytekits = getattr(LocalTaskCache.get, "flytekits", LocalTaskCache.get)

    def get(*arguments: Any, **named: Any) -> Any:
        outputs = flytekits(*arguments, **named)
        if outputs is not None:
            callback(outputs.literals)
        return outputs

    get.flytekits = flytekits  # type: ignore[attr-defined]
    LocalTaskCache.get = staticmethod(get)


def checkpoint_destination(checkpoint: SyncCheckpoint) -> str:
    """Return the URL of the folder for this attempt's checkpoint.

    SyncCheckpoint itself can read only the previous attempt's checkpoint, not what it has saved.
    """
    return str(checkpoint._checkpoint_dest)


def checkpoint_source(checkpoint: SyncCheckpoint) -> str | None:
    """Return the URL of the folder with the previous attempt's checkpoint; None for the first attempt.

    SyncCheckpoint itself says only whether there is one.
    """
    source: str | None = checkpoint._checkpoint_src
    return source


def replace_html(deck: Deck, html: str) -> None:
    """Replace the HTML of a Deck, whose own methods can only append."""
    deck._html = html


def borrow_error_code(own: type[FlyteException], other: type[FlyteException]) -> None:
    """Give an exception class, and its subclasses, the Flyte error code of another.

    The public error_code is a property that reads the attribute _ERROR_CODE.
    """
    own._ERROR_CODE = other.error_code


@contextmanager
def replaced_metadata(task: PythonFunctionTask, metadata: TaskMetadata) -> Iterator[None]:
    """Give a task other metadata while the block of a with statement runs, and restore its own afterwards."""
    registered = task.metadata
    task._metadata = metadata
    try:
        yield
    finally:
        task._metadata = registered
