"""Files in the platform's storage, by fsspec's own clients, which can do the same on every platform."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock
from fsspec import AbstractFileSystem
from fsspec.utils import get_protocol

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.data.fsspec_compat import own_client
from flyte_ddp.data.remote_files import Stored, describe_version
from flyte_ddp.errors import InputError
from flyte_ddp.whole_files import temporary_beside


def files_at(platform: Platform, url: str) -> tuple[AbstractFileSystem, str]:
    """Return the client for a URL, or for a path of this machine, and the client's name for the place."""
    files, root = own_client(url, platform.storage_options(get_protocol(url)))
    return files, root.rstrip("/")


def open_file(platform: Platform, url: str) -> BinaryIO:
    """Open a file of the storage for reading."""
    files, path = files_at(platform, url)
    file: BinaryIO = files.open(path, "rb")
    return file


def list_files(platform: Platform, folder: str) -> dict[str, str]:
    """Return the names of the files below a folder, sorted, each with a text that changes when the file does.

    The text is made of the storage's metadata, such as size and time; no file is read. Hidden files, and files in
    hidden folders, are left out.

    Args:
        platform: the platform.
        folder: the URL of the folder, or its path on this machine. If nothing is there, the dict is empty.

    Raises:
        InputError: `folder` is a file; its URL names no storage that can be read here; or a link in it leads nowhere or
            to a folder that contains the link.
        DataError: The folder may not be read.
        DownloadError: The storage still fails after several tries.
    """
    files = Stored(folder, platform.storage_options(get_protocol(folder))).details()
    if "" in files:
        raise InputError(f"folder must be a folder, got the file {folder}: give the folder that it is in")
    return {name: describe_version(details) for name, details in files.items()}


def folder_digest(platform: Platform, folder: str) -> str:
    """Return a digest that changes when a file is added, removed or written to.

    The digest is made of names, sizes, times and other metadata. Raises the errors of list_files(), and InputError if
    the folder has no files or is not there.
    """
    files = list_files(platform, folder)
    if not files:  # a storage has no empty folders, so a folder with a wrong name looks like one
        raise InputError(f"folder must have files, got {folder} without any: correct its path or URL")
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def download_once(url: str, name: str, download: Callable[[str], None]) -> Path:
    """Download a file or folder once per host, and return the path of the download, which all its processes share.

    The first process to call it downloads, while the others wait. The download goes to the folder for temporary files,
    under a hash of the URL. It is not repeated, even if the original changes. A path of this host is returned as it is.

    Args:
        url: the URL of the original, or its path on this host.
        name: the name that the file gets; empty for a folder.
        download: download(path) downloads the original, to a new file or into an empty folder. Its errors are raised,
            and the next call tries again.
    """
    path = Path(url.removeprefix("file://"))
    if path.exists():
        return path
    folder = Path(tempfile.gettempdir(), f"dataset-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            # Only a killed process can have left these, because others wait for the lock
            for left in folder.parent.glob(f".{folder.name}.*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            beside = temporary_beside(folder)
            try:
                beside.mkdir(mode=0o700)
                download(str(beside / name))
                os.rename(beside, folder)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    return folder / name
