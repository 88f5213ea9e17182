"""What an attempt at a task needs of the platform that runs it. All else in this package knows no platform.

flyte_ddp.flyte1.platform is that of flytekit. An implementation is a module with these functions, or an object; whoever
trains hands it on as the argument `platform`. The functions are called from threads, too, which run in a copy of the
task's contextvars. Secrets and settings reach an attempt as environment variables on every platform.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from flyte_ddp.launch.failures import Failure


class Platform(Protocol):
    """Flyte 1 or Flyte 2, as one attempt at a task sees it.

    Outside of a local run, an attempt has a folder of its own in the platform's storage, named by URLs, which may also
    be paths of this machine. Those of the logs and checkpoints are without a slash at their end, and the same for all
    pods of the attempt.
    """

    @property
    def download_errors(self) -> tuple[type[Exception], ...]:
        """What the platform's own download of an input raises; worth another attempt."""

    def is_local(self) -> bool:
        """Whether this is a run on the user's own machine, whose results stay there as files."""

    def working_folder(self) -> Path:
        """This attempt's own folder on this machine, gone with the pod; not for local runs, which have runs_dir()."""

    def earlier_attempts(self) -> int:
        """Their number, 0 for the first attempt and in a local run."""

    def execution(self) -> tuple[str, str]:
        """The execution's name, such as project/domain/name, equal for all its attempts and for no other execution, and
        the link to its page; the name is empty in a local run, the link where it is unknown.
        """

    def logs_url(self) -> str:
        """Where this attempt's logs go: a folder named logs, beside which the live report.html goes."""

    def previous_logs_url(self) -> str:
        """That of the attempt before; empty if there was none, or if it is unknown."""

    def checkpoint_url(self) -> str:
        """The folder for this attempt's checkpoint. An attempt may find its own there: if only its process, or its pod,
        was started again.
        """

    def previous_checkpoint_url(self) -> str:
        """That of the attempt before; empty if there was none."""

    def get(self, url: str, path: Path) -> None:
        """Download a file of the storage; path is new, its folder exists.

        Raises FileNotFoundError only if the storage says that there is no such file. If it cannot be asked, or fails,
        any other exception: a checkpoint that is there, but cannot be read now, is worth another attempt.
        """

    def put(self, path: Path, url: str) -> None:
        """Upload a file, over what is there; raises whatever the storage raises."""

    def storage_options(self, protocol: str) -> dict[str, Any]:
        """With which fsspec's own client opens the storage, such as the endpoint and key of s3; empty if it finds them
        itself. For whatever is not of this attempt alone: promoted models, the user's own mirror of datasets.
        """

    def publisher(self, title: str) -> Callable[[str], None]:
        """A function that replaces the task's page on the platform, with this title, by the HTML that it is given: a
        fragment, at once, while the task runs. It does nothing in a local run, whose page is a file.
        """

    def error(self, failure: Failure, message: str) -> Exception:
        """The exception with which the attempt ends, so that the platform shows the message, and starts another attempt
        if failure.recoverable and only then. It has the failure as its attribute `failure`.
        """
