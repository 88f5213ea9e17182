"""Flyte 1 as the platform of an attempt, by flytekit: a module with the functions of flyte_ddp.attempt.platform."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit import Deck, FlyteContextManager, current_context
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.data_persistence import FileAccessProvider, get_fsspec_storage_options
from flytekit.exceptions.system import FlyteDownloadDataException
from flytekit.exceptions.user import (
    FlyteDataNotFoundException,
    FlyteRecoverableException,
    FlyteUserException,
    FlyteUserRuntimeException,
)

from flyte_ddp.attempt.webhook import CONSOLE_VARIABLE
from flyte_ddp.errors import InputError
from flyte_ddp.flyte1.flytekit_compat import (
    borrow_error_code,
    checkpoint_destination,
    checkpoint_source,
    replace_html,
)
from flyte_ddp.launch.failures import Failure

# Flyte shows the earliest failure of all pods, so one that may be the effect of another counts as later
EFFECT_SECONDS = 10.0
download_errors = (FlyteDownloadDataException,)


def is_local() -> bool:
    """Return whether this is a run on the user's own machine, in a task or outside of any."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def working_folder() -> Path:
    """Return the task's temporary folder on this machine."""
    return Path(current_context().working_directory)


def earlier_attempts() -> int:
    return int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0)


def execution() -> tuple[str, str]:
    """Return the execution as project/domain/name, and the link to its page; each is empty if unknown."""
    if is_local():
        return "", ""
    identifier = current_context().execution_id
    page = f"projects/{identifier.project}/domains/{identifier.domain}/executions/{identifier.name}"
    console = os.environ.get(CONSOLE_VARIABLE, "").rstrip("/")
    link = os.environ.get("FLYTE_EXECUTION_URL") or (f"{console}/{page}" if console else "")
    return f"{identifier.project}/{identifier.domain}/{identifier.name}", link


# --- storage ---


def storage() -> FileAccessProvider:
    """Return flytekit's access to the storage of the current task."""
    return FlyteContextManager.current_context().file_access


def logs_url() -> str:
    return storage().raw_output_prefix.rstrip("/") + "/logs"


def previous_logs_url() -> str:
    """Return the URL of the previous attempt's logs, which are beside its checkpoint; empty for the first attempt."""
    earlier = previous_checkpoint_url()
    return f"{earlier.rpartition('/')[0]}/logs" if earlier else ""


def checkpoint_url() -> str:
    return checkpoint_destination(_checkpoint()).rstrip("/")


def previous_checkpoint_url() -> str:
    """Return the URL of the folder with the previous attempt's checkpoint; empty for the first attempt."""
    return (checkpoint_source(_checkpoint()) or "").rstrip("/")


def _checkpoint() -> SyncCheckpoint:
    """Return flytekit's checkpoint of the current task. Raises InputError outside of tasks."""
    try:
        checkpoint: SyncCheckpoint = current_context().checkpoint
    except NotImplementedError:  # flytekit raises it outside of tasks, and on a platform that is too old
        raise InputError(
            "run() must be called in a task, while Flyte runs that: call the task, or flyte_ddp.train without Flyte"
        ) from None
    return checkpoint


def get(url: str, path: Path) -> None:
    """Download a file of the storage. Raises FileNotFoundError if the storage has no such file."""
    try:
        storage().get_data(url, str(path))
    except FlyteDataNotFoundException:
        raise FileNotFoundError(url) from None


def put(path: Path, url: str) -> None:
    storage().put_data(str(path), url)


def storage_options(protocol: str) -> dict[str, Any]:
    """Return the options for fsspec's client of a protocol such as "s3", from flytekit's configuration."""
    return get_fsspec_storage_options(protocol, storage().data_config)


# --- what Flyte shows ---


def publisher(title: str) -> Callable[[str], None]:
    """Return a function that shows HTML in the task's Deck of this title, in place of the HTML that it showed before.

    The Deck is published at each call, except in a process of Flyte's Elastic plugin, which publishes Decks at the end.
    In a local run, and for a task without Decks, the function does nothing.
    """
    if is_local() or not current_context().enable_deck:
        return lambda html: None  # a local run's page is a file that one can open
    deck = Deck(title, "")

    def publish(html: str) -> None:
        replace_html(deck, html)
        if current_context().enable_deck:  # not in a process of Flyte's Elastic plugin, which shows Decks at the end
            Deck.publish()

    return publish


class TaskError(FlyteUserException):
    """A task's failure, whose message Flyte's console shows first.

    For an exception with a traceback, flytekit writes the message after the stack, here that of the parent, where
    nothing is wrong. `raise … from None` drops the cause alone, so this exception keeps no traceback.
    """

    def __init__(self, failure: Failure, message: str):
        super().__init__(message, timestamp=failure.at + (EFFECT_SECONDS if failure.is_effect else 0))
        self.failure = failure

    __traceback__: Any = property(lambda self: None, lambda self, value: None)
    __str__ = Exception.__str__


class TaskInterruptedError(TaskError, FlyteRecoverableException):
    """A failure after which Flyte starts another attempt."""


borrow_error_code(TaskError, FlyteUserRuntimeException)
borrow_error_code(TaskInterruptedError, FlyteRecoverableException)


def error(failure: Failure, message: str) -> TaskError:
    """Return the exception for a task to end with: Flyte starts another attempt if failure.recoverable."""
    return (TaskInterruptedError if failure.recoverable else TaskError)(failure, message)
