"""The private parts of Flyte 2's SDK that this package uses, as of version 2.12.1; tests/compat tests them."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, cast

import click
from flyte._persistence._db import LocalDB
from flyte.cli._params import JsonParamType
from flyte.clustered import ClusterFailurePolicy
from flyte.types import TypeEngine, TypeTransformerFailedError


def get_python_type(option: click.ParamType) -> Any:
    """Return the Python type that an option of JSON is converted to; None for other options."""
    return option._python_type if isinstance(option, JsonParamType) else None


def read_json_inputs(kind: type, read: Callable[[str], Any]) -> None:
    """Patch `flyte run` so that `read` parses the JSON of inputs of this kind and its subclasses.

    The patch lasts as long as the process. A second call replaces the first patch.

    Args:
        kind: a class with from_dict, which gets what read returns.
        read: takes the text, and returns a dict.
    """
    # The SDK's own reader would take the last of several values for a key, and drop the keys that it does not know.
    # A second call must not wrap the function again.
    original = getattr(JsonParamType.convert, "original", JsonParamType.convert)

    def convert(self: JsonParamType, value: Any, param: Any, context: Any) -> Any:
        ours = isinstance(self._python_type, type) and issubclass(self._python_type, kind)
        if ours and isinstance(value, str):
            return self._python_type.from_dict(read(value))
        return original(self, value, param, context)

    convert.original = original  # type: ignore[attr-defined]
    JsonParamType.convert = convert  # type: ignore[method-assign,assignment]


def refuse_inputs(kind: type[Exception], error_of: Callable[[Exception], Exception]) -> None:
    """Patch the SDK to end an attempt with error_of(error) if reading an input raises an error of class `kind`.

    Without the patch, the pod just ends: the SDK doesn't report its own error for such an input to Flyte. A second call
    replaces the first patch.

    Args:
        kind: the class of the errors that a constructor of an input's type raises.
        error_of: gets that error and returns the one to raise instead.
    """
    original = getattr(TypeEngine.literal_map_to_kwargs, "original", TypeEngine.literal_map_to_kwargs)

    async def literal_map_to_kwargs(*arguments: Any, **named: Any) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], await original(*arguments, **named))
        except TypeTransformerFailedError as error:
            if isinstance(error.__cause__, kind):
                raise error_of(error.__cause__) from None
            raise

    literal_map_to_kwargs.original = original  # type: ignore[attr-defined]
    TypeEngine.literal_map_to_kwargs = literal_map_to_kwargs  # type: ignore[method-assign]


@contextmanager
def local_cache() -> Iterator[sqlite3.Connection]:
    """Open the local cache for a with statement, as a database connection.

    This is for listing and deleting entries, which the SDK cannot do. The table task_cache has a key and a value, a
    serialised Outputs. Changes are committed if the block ends without an error, and else rolled back. If there is no
    cache, the table is empty and only in memory.
    """
    path = LocalDB._get_cache_dir() / "cache.db"
    with closing(sqlite3.connect(path if path.exists() else ":memory:")) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS task_cache (key TEXT PRIMARY KEY, value BLOB)")
        yield connection


def with_replicas(clustered: Any, replicas: int) -> Any:
    """Return a copy of a clustered task's plugin_config for another number of pods, without any restarts by Flyte.

    Args:
        clustered: the plugin_config of the task. It is not changed.
        replicas: the number of pods.
    """
    settings = replace(clustered.settings, replicas=replicas, failure_policy=ClusterFailurePolicy())
    return replace(clustered, settings=settings)
