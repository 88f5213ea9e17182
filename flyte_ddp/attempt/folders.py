"""The folders in which runs leave their files, and the pages of tasks in them."""

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.report.article import document
from flyte_ddp.whole_files import absolute, write_whole, writing_to


def runs_dir() -> Path:
    """Return the folder where local runs store their results: DDP_RUNS_DIR, else a folder in the user's home."""
    chosen, data = os.environ.get("DDP_RUNS_DIR"), os.environ.get("XDG_DATA_HOME", "")
    default = Path(data if os.path.isabs(data) else "~/.local/share", "flyte-ddp", "runs")
    return absolute(chosen or default, "DDP_RUNS_DIR")


@contextmanager
def run_folder(platform: Platform, name: str) -> Iterator[Path]:
    """Provide a folder for the outputs of one run.

    A context manager. A local run gets a new folder below the folder for runs, named by time and `name`. If the block
    raises, the folder is removed with all its files; otherwise it stays. On a cluster, the folder is the platform's
    working folder, and errors of the block are turned by platform_errors().

    Raises:
        InputError: The local folder for runs cannot be written to.
    """
    if not platform.is_local():
        with platform_errors(platform):
            yield platform.working_folder()
        return
    folder = runs_dir() / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(3)}"
    with writing_to(runs_dir(), "DDP_RUNS_DIR"):
        folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        gone = folder.with_name(f".{folder.name}")
        with suppress(OSError):  # the folder may be gone; the error below is what matters
            os.rename(folder, gone)  # an observer that is still at work can no longer write to the folder
        shutil.rmtree(gone, ignore_errors=True)
        raise


def local_paths(literals: Iterable[Any]) -> Iterator[str]:
    """Yield the local paths, those that begin with "/", of all files and folders in the outputs of a task.

    They are also found in optional outputs, in lists and dicts, and in dataclasses, however deep.

    Args:
        literals: the outputs, each a protobuf message Literal, of Flyte 1 or 2.
    """
    for literal in literals:
        scalar = literal.scalar
        if scalar.binary.tag == "msgpack":  # pickled outputs have another tag
            import msgpack

            yield from _paths_in(msgpack.loads(scalar.binary.value, strict_map_key=False))
        elif scalar.blob.uri.startswith("/"):
            yield scalar.blob.uri
        yield from local_paths(literal.collection.literals)
        yield from local_paths(literal.map.literals.values())
        if scalar.HasField("union"):
            yield from local_paths([scalar.union.value])


def _paths_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if str(value.get("path")).startswith("/"):
            yield str(value["path"])
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _paths_in(one)


# --- page ---


def write_page(platform: Platform, folder: Path, title: str, fragment: str) -> Path:
    """Write an HTML page to the file report.html in the folder, and show the page on the platform, too.

    Args:
        platform: the platform.
        folder: the folder, which exists.
        title: the title of the page.
        fragment: the HTML inside the page's body.

    Returns:
        The path of report.html.
    """
    path = folder / "report.html"
    write_whole(path, document(title, fragment).encode())
    platform.publisher(title)(fragment)
    return path
