"""The interface of a platform: what an attempt at a task needs of it. All else in this package knows no platform.

flyte_ddp.flyte1.platform implements it by flytekit. An implementation is a module with these functions, or an object.
Whoever trains passes it on as the argument `platform`. The functions are called from threads, too, which run in a copy
of the task's contextvars. Secrets and settings reach an attempt as environment variables on every platform.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from flyte_ddp.launch.failures import Failure


class Platform(Protocol):
    """Flyte 1 or Flyte 2, as one attempt at a task sees it.

    Outside of a local run, an attempt has a folder of its own in the platform's storage, named by URLs, which may also
    be paths of this machine. The URLs of logs and checkpoints have no slash at their end, and are the same for all pods
    of the attempt.
    """

    @property
    def download_errors(self) -> tuple[type[Exception], ...]:
        """Return the errors that the platform's own download of an input raises, which are worth another attempt."""

    def is_local(self) -> bool:
        """Return whether this is a run on the user's own machine, whose results stay there as files."""

    def working_folder(self) -> Path:
        """Return this attempt's own folder on this machine, which is gone with the pod.

        Local runs use runs_dir() instead.
        """

    def earlier_attempts(self) -> int:
        """Return the number of earlier attempts, 0 in a local run."""

    def execution(self) -> tuple[str, str]:
        """Return the execution's name, such as project/domain/name, and the link to its page.

        The name is equal for all attempts of an execution and for no other execution, and empty in a local run. The
        link is empty if it is unknown.
        """

    def logs_url(self) -> str:
        """Return the URL of this attempt's logs: a folder named logs, beside which the live report.html goes."""

    def previous_logs_url(self) -> str:
        """Return the URL of the previous attempt's logs.

        Empty if there was no such attempt, or if the URL is unknown.
        """

    def checkpoint_url(self) -> str:
        """Return the URL of the folder for this attempt's checkpoint.

        The attempt may find its own checkpoint there if only its process, or its pod, was started again.
        """

    def previous_checkpoint_url(self) -> str:
        """Return the URL of the folder with the previous attempt's checkpoint; empty if there was no such attempt."""

    def get(self, url: str, path: Path) -> None:
        """Download a file of the storage to a new path, whose folder exists.

        Raises:
            FileNotFoundError: The storage says that there is no such file.
            Exception: The storage cannot be reached, or fails in another way. Each storage has errors of its own, and
                another try may succeed.
        """

    def put(self, path: Path, url: str) -> None:
        """Upload a file, and replace what is at the URL. Raises whatever the storage raises."""

    def storage_options(self, protocol: str) -> dict[str, Any]:
        """Return the options with which fsspec's own client opens the storage, such as the endpoint and key of s3.

        They are for files that belong to more than this attempt: promoted models, or the user's own mirror of datasets.
        They are empty if the client finds them itself.
        """

    def publisher(self, title: str) -> Callable[[str], None]:
        """Return a function that replaces the task's page on the platform by the HTML fragment that it gets.

        The function works at once, while the task runs. It does nothing in a local run, whose page is a file.
        """

    def error(self, failure: Failure, message: str) -> Exception:
        """Return the exception with which the attempt ends, with the failure as its attribute `failure`.

        The platform shows the message, and starts another attempt if and only if failure.recoverable.
        """
