"""What differs between a local execution and one on a cluster."""

import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager, current_context
from flytekit.exceptions.system import FlyteDownloadDataException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserException, FlyteUserRuntimeException

from flyte_ddp.errors import DataError, DownloadError
from flyte_ddp.launch.failures import Failure, from_exception
from flyte_ddp.storage import writing_to
from flyte_ddp.tasks.flytekit_compat import local_cache, with_error_code_of
from flyte_ddp.text import encodable, shortened

# Flyte does not read an error file above its storage's limit, 2 MB by default, and then knows neither cause nor retry
MOST_CHARACTERS = 50_000


def is_local() -> bool:
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def runs_dir() -> Path:
    """Where local runs store their results: DDP_RUNS_DIR, else a folder in the user's home."""
    default = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "flyte-ddp" / "runs"
    return Path(os.environ.get("DDP_RUNS_DIR") or default).expanduser().absolute()


@contextmanager
def run_dir(name: str) -> Iterator[Path]:
    """A folder for the outputs of one run; that of a local run is new and permanent, but removed if the run fails."""
    if not is_local():
        yield Path(current_context().working_directory)
        return
    folder = runs_dir() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(3)}"
    with writing_to(runs_dir(), "DDP_RUNS_DIR"):
        folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        gone = folder.with_name(f".{folder.name}")
        os.rename(folder, gone)  # an observer that is still at work writes no more to it
        shutil.rmtree(gone, ignore_errors=True)
        raise


@with_error_code_of(FlyteUserRuntimeException)
class TaskError(FlyteUserException):
    """A task's failure, for which Flyte's console shows the message first.

    For other exceptions the message follows the stack, here that of the parent, where nothing is wrong.
    """

    def __init__(self, message: str, failure: Failure, timestamp: float | None = None):
        super().__init__(message, timestamp=timestamp)
        self.failure = failure

    __traceback__: Any = property(lambda self: None, lambda self, value: None)
    __str__ = Exception.__str__


@with_error_code_of(FlyteRecoverableException)
class TaskInterruptedError(TaskError, FlyteRecoverableException):
    """A task's failure that Flyte retries."""


@contextmanager
def flyte_retries() -> Iterator[None]:
    """On a cluster, raises TaskError or TaskInterruptedError instead of our own errors and those of a download: Flyte
    retries only after a FlyteRecoverableException."""
    try:
        yield
    except (click.ClickException, FlyteDownloadDataException) as error:
        if is_local():
            raise
        raise task_error(failure_of(error)) from None


def failure_of(error: BaseException) -> Failure:
    """The failure that an error carries; else the error itself, outside of the ranks."""
    carried: Failure | None = getattr(error, "failure", None)
    return carried or from_exception(_of_a_download(error), None, platform.node())


def _of_a_download(error: BaseException) -> BaseException:
    """An input that was not downloaded, or is damaged in a pod, which has but a copy, is worth another attempt."""
    if isinstance(error, FlyteDownloadDataException):
        return DownloadError(" ".join(error.args[0].split()))
    if isinstance(error, DataError) and not is_local():
        return DownloadError(f"{error.problem} in this pod: if each attempt ends so, run with --overwrite-cache")
    return error


def task_error(failure: Failure, logs: str = "", timestamp: float | None = None) -> TaskError:
    """The exception that Flyte shows for a failure; the second line of its message says where the logs are."""
    headline, separator, details = encodable(str(failure)).partition("\n")
    where = f"\nLogs: {logs}" if logs else ""
    failed = TaskInterruptedError if failure.recoverable else TaskError
    message = f"{shortened(headline, MOST_CHARACTERS)}{where}{separator}{shortened(details, MOST_CHARACTERS)}"
    return failed(message, failure, timestamp)


def forget_lost_results() -> None:
    """Drops local cache entries whose files are gone, so that the tasks run again instead of failing.

    Flyte's local cache stores paths, never contents, and offers no such check.
    """
    cache = local_cache()
    for key in list(cache):
        outputs = LiteralMap.FromString(cache[key])
        if not all(os.path.exists(path) for path in _local_paths(outputs)):
            del cache[key]


def _local_paths(outputs: LiteralMap) -> Iterator[str]:
    for literal in outputs.literals.values():
        for one in literal.collection.literals or [literal]:
            if one.scalar.blob.uri.startswith("/"):
                yield one.scalar.blob.uri
