"""Flyte 2 as the platform of an attempt, by its SDK: a module with the functions of flyte_ddp.attempt.platform."""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import flyte
import flyte.errors
import flyte.report
from flyte import storage
from flyte.models import CheckpointPaths
from flyte.syncify import syncify

from flyte_ddp.attempt.pod import HANDOVER_VARIABLE, PREVIOUS_VARIABLE
from flyte_ddp.attempt.webhook import CONSOLE_VARIABLE
from flyte_ddp.launch.failures import Failure

download_errors = ()  # flyte_ddp.flyte2.data raises a DownloadError itself


def is_local() -> bool:
    """Return whether this is a local run, or a plain call of a task's function without a run."""
    context = flyte.ctx()
    return not context or context.mode != "remote"


def working_folder() -> Path:
    return _working_folder(flyte.ctx().action.name, earlier_attempts())


@cache
def _working_folder(*attempt: object) -> Path:
    return Path(tempfile.mkdtemp(prefix="attempt-"))


def earlier_attempts() -> int:
    """Return the number of earlier attempts at this training.

    With several numbers of nodes, each failed action of flyte_ddp.flyte2.sizes counts as an attempt.
    """
    before = int(os.environ.get(HANDOVER_VARIABLE, "0").rpartition("/")[2])
    return before + (flyte.ctx().attempt_number if flyte.ctx() else 0)


def execution() -> tuple[str, str]:
    """Return the run's name and the link to its page in Flyte's console.

    Returns:
        The name as PROJECT/DOMAIN/NAME, and the link. Both are empty in a local run. The link is empty if the
        variable with the console's address is not set.
    """
    if is_local():
        return "", ""
    run = flyte.ctx().action
    console = os.environ.get(CONSOLE_VARIABLE, "").rstrip("/")
    page = f"v2/domain/{run.domain}/project/{run.project}/runs/{run.run_name}"
    return f"{run.project}/{run.domain}/{run.run_name}", f"{console}/{page}" if console else ""


# --- storage ---


def logs_url() -> str:
    """Return the URL of the logs, which are beside the checkpoint: Flyte gives each attempt a folder for that.

    A pod that Flyte starts once more within the attempt, because it was killed, has a folder of its own in it, so that
    the log of the pod before remains.
    """
    return _logs_urls(_attempt_url(), flyte.ctx().restart_attempt)[-1]


def previous_logs_url() -> str:
    """Return the URL of the log folder of the pod that ran before this one; empty if none did.

    Flyte may replace a killed pod within an attempt, so the pod before may belong to the same attempt. For an attempt's
    first pod, the pod before is the last one of the previous attempt. Call the function in a pod.
    """
    *earlier, _ = _logs_urls(_attempt_url(), flyte.ctx().restart_attempt)
    if not earlier and (previous := previous_checkpoint_url()):
        first, *later = _logs_urls(previous.rpartition("/")[0], None)
        earlier = [first, *later[:-1]]  # the last of these URLs is the first one that does not exist
    return earlier[-1] if earlier else ""


@cache
def _logs_urls(attempt: str, restarts: int | None) -> list[str]:
    """Return the URLs of the log folders of an attempt's pods so far, in the order in which the pods ran.

    Args:
        attempt: the URL of the attempt's folder.
        restarts: how many pods of the attempt were killed, so that the list has one URL more. None means that the
            number is unknown: then the list ends with the first folder that has no log.
    """
    urls = [f"{attempt}/logs"]
    while (restarts is None and _exists(f"{urls[-1]}/console.log")) or len(urls) <= (restarts or 0):
        urls.append(f"{attempt}/restart-{len(urls)}/logs")
    return urls


def _exists(url: str) -> bool:
    """Return whether the storage has a file; False if it cannot be asked."""
    try:
        return bool(storage.get_underlying_filesystem(path=url).exists(url))
    except Exception:  # the download of the checkpoint comes next, meets the same error, and handles it
        return False


def _attempt_url() -> str:
    return checkpoint_url().rpartition("/")[0]


def checkpoint_url() -> str:
    return _path(_checkpoint_paths().checkpoint_path)


def previous_checkpoint_url() -> str:
    """Return the URL of the folder with the previous attempt's checkpoint; empty if there was no such attempt.

    The first attempt of an action of flyte_ddp.flyte2.sizes continues from the action before.
    """
    return _path(_checkpoint_paths().prev_checkpoint_path) or os.environ.get(PREVIOUS_VARIABLE, "")


def _checkpoint_paths() -> CheckpointPaths:
    paths = flyte.ctx().checkpoint_paths
    assert paths  # every pod has them
    return paths


def _path(argument: str | None) -> str:
    """Return a URL that the pod got as an argument; empty for None, or for "", which the first attempt gets."""
    return (argument or "").strip().strip('"').rstrip("/")


def get(url: str, path: Path) -> None:
    storage.get_underlying_filesystem(path=url).get_file(url, str(path))


def put(path: Path, url: str) -> None:
    storage.get_underlying_filesystem(path=url).makedirs(url.rpartition("/")[0], exist_ok=True)  # where it has folders
    syncify(storage.put)(str(path), url)


def storage_options(protocol: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if protocol == "s3":
        s3 = storage.S3.auto()
        known = {"key": s3.access_key_id, "secret": s3.secret_access_key, "endpoint_url": s3.endpoint}
        if s3.addressing_style:
            known["config_kwargs"] = {"s3": {"addressing_style": s3.addressing_style}}
    elif protocol in ("abfs", "abfss"):
        azure = storage.ABFS.auto()
        names = ("account_name", "account_key", "tenant_id", "client_id", "client_secret")
        known = {name: getattr(azure, name) for name in names}
    return {name: value for name, value in known.items() if value}


# --- what Flyte shows ---


def publisher(title: str) -> Callable[[str], None]:
    """Return a function that replaces the HTML in the report's tab of this title, and sends the report.

    In a local run the function does nothing.
    """
    if is_local():
        return lambda html: None  # a local run's page is a file that one can open
    tab = flyte.report.get_tab(title)

    def publish(html: str) -> None:
        tab.replace(html)
        flyte.report.flush()

    return publish


class AttemptError(flyte.errors.RuntimeUserError):
    """A failure that Flyte retries, as it does with all but a FinalError."""

    def __init__(self, failure: Failure, message: str):
        super().__init__(failure.cause, message)
        self.failure = failure


class FinalError(flyte.errors.NonRecoverableError):
    """A failure that would come again."""

    def __init__(self, failure: Failure, message: str):
        super().__init__(message, failure.cause)
        self.failure = failure


def error(failure: Failure, message: str) -> AttemptError | FinalError:
    return (AttemptError if failure.recoverable else FinalError)(failure, message)
