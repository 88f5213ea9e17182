"""Files and folders of Flyte 2, between its storage and this machine. As inputs of tasks they are cached by content."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flyte
from flyte.io import Dir, File

from flyte_ddp.attempt.platform_storage import download_once, folder_digest, open_file
from flyte_ddp.errors import DownloadError, InputError
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.whole_files import stream_digest


def downloaded(file_or_folder: File | Dir | None, to: str | None = None) -> Path | None:
    """Return the path of the file or folder on this machine, after downloading it if necessary; None for None.

    Args:
        file_or_folder: the input.
        to: the path for a copy. None makes no copy of a file or folder that is on this machine.

    Raises:
        DownloadError: the download has failed, which is worth another attempt.
    """
    if file_or_folder is None:
        return None
    try:
        return Path(file_or_folder.download_sync(to))
    except Exception as error:  # each storage has errors of its own
        raise DownloadError(f"{file_or_folder.path} cannot be downloaded: {type(error).__name__}: {error}") from None


def downloaded_once(file_or_folder: File | Dir | None) -> Path | None:
    """Download a file or folder once per host, and return the path of the download, which all ranks of the host share.

    The first process to call it downloads, while the others wait. The download goes to the folder for temporary files,
    under a hash of the URL. It is not repeated, even if the original changes. A path of this host is returned as it is,
    and None for None.

    Raises:
        DownloadError: the download has failed, which is worth another attempt.
    """
    if file_or_folder is None:
        return None

    def download(path: str) -> None:
        downloaded(file_or_folder, path)

    name = "" if isinstance(file_or_folder, Dir) else Path(file_or_folder.path).name
    return download_once(file_or_folder.path, name, download)


def output_file(path: Path) -> File:
    """Return a file on this machine as a task's output. It is uploaded on a cluster, and else stays where it is."""
    return File.from_local_sync(str(path)) if flyte.ctx() else File(path=str(path))


def output_folder(path: Path, url: str = "", digest: str | None = None) -> Dir:
    """Return a folder on this machine as a task's output.

    On a cluster the folder is uploaded. In a task of a local run it is uploaded only if there is a url. Outside of
    tasks it stays where it is, and the url is ignored.

    Args:
        path: the folder on this machine.
        url: the URL in the storage where the folder goes; empty leaves that to Flyte.
        digest: the digest of the folder's content, which is its key in the caches; None leaves the key to Flyte.
    """
    if not flyte.ctx():
        return Dir(path=str(path), hash=digest)
    return Dir.from_local_sync(str(path), url or None, dir_cache_key=digest)


def by_content(file: File | None) -> File | None:
    """Return the same file with the SHA-256 of its content as its cache key; None for None.

    The file is read where it is, and not copied. Call it for a model_state or checkpoint to start from.

    Raises:
        FinalError: The file is missing, or is a folder. In a local run also: the storage fails.
        Exception: On a cluster, what the storage's client raises.
    """
    if file is None:
        return None
    with one_attempt(), must_exist(file), open_file(platform, file.path) as content:
        return File(path=file.path, hash=stream_digest(content))


def folder_by_content(folder: Dir) -> Dir:
    """Return the same folder, with a cache key that changes when a file is added, removed or written to.

    The key is made of names, sizes and times; no file is read.

    Raises:
        FinalError: The folder is a file, has no files, or is not there. In a local run also: the storage fails.
        AttemptError: On a cluster, the storage fails.
    """
    with one_attempt(), must_exist(folder):
        return Dir(path=folder.path, hash=folder_digest(platform, folder.path))


@contextmanager
def must_exist(file_or_folder: File | Dir) -> Iterator[None]:
    """Raise InputError if the block finds that an input is missing, is a folder instead of a file, or the reverse."""
    kind = "folder" if isinstance(file_or_folder, Dir) else "file"
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise InputError(f"{file_or_folder.path} must be a {kind} that is there: give the path or URL of one") from None
