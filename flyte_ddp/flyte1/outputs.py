"""The outputs of tasks. A local run's files stay where they are: flytekit would copy them to a temporary place."""

from pathlib import Path
from typing import Any, TypeVar

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.attempt.folders import write_page
from flyte_ddp.flyte1 import platform

F = TypeVar("F", bound=FlyteFile)


def output_file(path: Path, kind: type[F] = FlyteFile) -> F:
    """Return a file on this machine as an output of a type."""
    return kind(str(path), remote_path=_storage())


def output_folder(path: Path, url: str = "") -> FlyteDirectory:
    """Return a folder on this machine as a task's output.

    Flyte uploads the folder when the task ends. In a local run without `url`, the folder stays where it is.

    Args:
        path: the folder on this machine.
        url: where the folder goes in Flyte's storage, which may have some of its files already; empty leaves that to
            Flyte. A local run must leave it empty.
    """
    return FlyteDirectory(str(path), remote_directory=url or _storage())


def output_page(folder: Path, title: str, fragment: str) -> FlyteFile:
    """Write a page as an HTML file in the folder, show it as the task's Deck, and return the file."""
    return output_file(write_page(platform, folder, title, fragment))


def _storage() -> Any:
    """Return False to leave a file where it is, or None to let Flyte choose a place in its storage."""
    return False if platform.is_local() else None
