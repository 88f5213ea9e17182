"""The handover of an action to the next one of the same training, by files in a folder of the storage.

They say where the action's checkpoints are, and how it has failed. An action whose nodes never came leaves nothing.
"""

import dataclasses
import json
import os
from contextlib import suppress

from flyte_ddp.attempt.checkpoints import point_to_previous
from flyte_ddp.attempt.pod import HANDOVER_VARIABLE
from flyte_ddp.attempt.storage_folder import StorageFolder, retry_storage
from flyte_ddp.errors import RecoverableError
from flyte_ddp.flyte2 import platform
from flyte_ddp.launch.failures import Failure
from flyte_ddp.text import explain_error

PLACE, FAILURE = "checkpoints-url", "failure.json"


def leave_place() -> None:
    """Record in the storage where this action keeps its checkpoints, for the next action of the same training.

    Rank 0 alone calls this function, before it trains. flyte_ddp.flyte2.sizes starts such actions, one for each number
    of nodes that it tries. In any other action, nothing is recorded. A note in this action's folder of checkpoints
    names the previous action's folder, in case that this action writes none.

    Raises:
        RecoverableError: The storage fails.
    """
    if folder := os.environ.get(HANDOVER_VARIABLE):
        point_to_previous(platform)  # before: once the next action knows this place, it looks nowhere else
        try:
            StorageFolder(platform, folder).put_text(platform.checkpoint_url(), PLACE)
        except OSError as error:  # without the record, the next action would not find this one's checkpoints
            raise RecoverableError(f"cannot write {folder}/{PLACE}: {explain_error(error)}: check access") from None


def leave_failure(failure: Failure) -> None:
    """Record the failure of this action, for the next one. Rank 0 calls it."""
    if folder := os.environ.get(HANDOVER_VARIABLE):
        put_failure(failure, folder, FAILURE)


def put_failure(failure: Failure, folder: str, name: str) -> None:
    """Write a failure to a file of a folder in the storage, unless the storage fails: readers do without it."""
    with suppress(OSError):
        StorageFolder(platform, folder).put_text(json.dumps(dataclasses.asdict(failure)), name)


def place_left(folder: str) -> str:
    """Return the place of checkpoints that an action has left; empty if there is none."""
    return _read(folder, PLACE)


def failure_left(folder: str) -> Failure | None:
    failure = _read(folder, FAILURE)
    return Failure(**json.loads(failure)) if failure else None


def _read(folder: str, name: str) -> str:
    return retry_storage(f"cannot read {folder}/{name}", lambda: StorageFolder(platform, folder).fetch_text(name))
