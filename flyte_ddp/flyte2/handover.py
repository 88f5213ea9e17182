"""The handover of an action to the next one of the same training, by files in a folder of the storage.

They say where the action's checkpoints are, and how it has failed. An action whose nodes never came leaves nothing.
"""

import dataclasses
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from flyte_ddp.attempt.checkpoints import patiently, point_to_previous
from flyte_ddp.attempt.pod import HANDOVER_VARIABLE, PREVIOUS_VARIABLE
from flyte_ddp.errors import RecoverableError
from flyte_ddp.flyte2 import platform
from flyte_ddp.launch.failures import Failure
from flyte_ddp.report.background import one_line

PLACE, FAILURE = "checkpoints-url", "failure.json"


def variables(folder: str, previous: str) -> dict[str, str]:
    """Return the variables of an action.

    Args:
        folder: the folder for what it leaves, named by the number of actions that have failed before.
        previous: the place of checkpoints that an earlier action has left, if any.
    """
    return {HANDOVER_VARIABLE: folder, PREVIOUS_VARIABLE: previous}


def leave_place() -> None:
    """Record where this action keeps its checkpoints, for the next action. Rank 0 calls it.

    Until there is a checkpoint, the place points to the previous action's.
    """
    if folder := os.environ.get(HANDOVER_VARIABLE):
        point_to_previous(platform)
        url = f"{folder}/{PLACE}"
        try:
            _put(platform.checkpoint_url(), url)
        except Exception as error:  # without the record, the next action would not find this one's checkpoints
            problem = f"{type(error).__name__}: {one_line(error)}"
            raise RecoverableError(f"cannot write {url}: {problem}: check access") from None


def leave_failure(failure: Failure) -> None:
    """Record the failure of this action, for the next one. Rank 0 calls it."""
    if folder := os.environ.get(HANDOVER_VARIABLE):
        put_failure(failure, f"{folder}/{FAILURE}")


def put_failure(failure: Failure, url: str) -> None:
    with suppress(Exception):  # if storage fails, the reader of the failure does without it
        _put(json.dumps(dataclasses.asdict(failure)), url)


def place_left(folder: str) -> str:
    """Return the place of checkpoints that an action has left; empty if there is none."""
    return _get(f"{folder}/{PLACE}")


def failure_left(folder: str) -> Failure | None:
    failure = _get(f"{folder}/{FAILURE}")
    return Failure(**json.loads(failure)) if failure else None


def _put(text: str, url: str) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        platform.put(Path(file.name), url)


def _get(url: str) -> str:
    with tempfile.TemporaryDirectory() as folder, suppress(FileNotFoundError):
        file = Path(folder, "file")
        patiently(f"cannot read {url}", lambda: platform.get(url, file))
        return file.read_text()
    return ""
