"""Files in the platform's storage, by fsspec's own clients: what they can do is the same on every platform."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.data.stored import find, fsspecs_own


def files_at(platform: Platform, url: str) -> tuple[AbstractFileSystem, str]:
    """The client for a URL, or for a path of this machine, and what the client calls it."""
    with fsspecs_own(url):
        files, root = url_to_fs(url, **platform.storage_options(get_protocol(url)))
    return files, root.rstrip("/")


def open_file(platform: Platform, url: str) -> BinaryIO:
    """For reading."""
    files, path = files_at(platform, url)
    file: BinaryIO = files.open(path, "rb")
    return file


def list_files(platform: Platform, folder: str) -> dict[str, str]:
    """Each file's name below the folder, sorted, with details that change when the file does; without hidden files."""
    files, root = files_at(platform, folder)
    found = {path[len(root) + 1 :]: str(details) for path, details in find(files, root).items()}
    return {name: found[name] for name in sorted(found) if not any(part[0] == "." for part in name.split("/"))}


def folder_digest(platform: Platform, folder: str) -> str:
    """A hash that changes when a file is added, removed or written to; of names, sizes, times and other metadata."""
    return hashlib.sha256(json.dumps(list_files(platform, folder)).encode()).hexdigest()


def download_once(url: str, name: str, download: Callable[[str], None]) -> Path:
    """A copy of the file or folder that all ranks of this host share; the first one to ask downloads it.

    name: of the file; empty for a folder. download: to a new file, or into an empty folder.
    """
    folder = Path(tempfile.gettempdir(), f"dataset-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
            download(str(beside / name))
            os.rename(beside, folder)
    return folder / name
