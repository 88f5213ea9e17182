"""Functions that write files so that a reader never sees half of one. Standard library only."""

import glob
import hashlib
import io
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from flyte_ddp.errors import InputError

LEFTOVER_SECONDS = 3600.0


@contextmanager
def writing_to(directory: str | Path, variable: str) -> Iterator[None]:
    """Turn each OSError of the block, such as that of a full or read-only disk, into an InputError; a context manager.

    The message names the folder, the reason and the variable.

    Args:
        directory: the folder that the block writes to.
        variable: the name of the environment variable, or argument, with which the user can choose another folder.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {directory}: {error.strerror or error}; free or allow space there, "
            f"or set {variable} to another folder"
        ) from None


@contextmanager
def reading() -> Iterator[None]:
    """Turn a PermissionError of the block into an InputError that names the file or folder that may not be read."""
    try:
        yield
    except PermissionError as error:
        raise InputError(f"{error.filename} may not be read: allow it (chmod -R u+rX), or give another") from None


def absolute(path: str | Path, variable: str) -> Path:
    """Return a path as an absolute one. Nothing needs to be there.

    Args:
        path: a path, which may begin with "~", or be relative to the current folder.
        variable: the environment variable, or argument, that has the path, for the error's message.

    Raises:
        InputError: There is no home folder, or the current folder has been removed.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise InputError(f"no home folder for {path}: set {variable} to an absolute path") from None
    except FileNotFoundError:
        raise InputError("the current folder has been removed: change to one that is there (cd)") from None


def temporary_beside(path: Path) -> Path:
    """Return a path in the same folder that no other process uses, for os.replace. remove_leftovers recognises it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def remove_leftovers(directory: str | Path, name: str = "") -> None:
    """Remove the temporary files and folders (.NAME.*.partial) that killed processes have left in a folder.

    Whatever cannot be removed is left there, without an error.

    Args:
        directory: the folder.
        name: the NAME of a file, which no other process may be writing now. Without a name, all temporary
            files are removed that nobody has changed for an hour.
    """
    for path in Path(directory).glob(f".{glob.escape(name)}.*.partial" if name else ".*.partial"):
        with suppress(OSError):
            if name or time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def synced_file(path: Path) -> Iterator[io.BufferedRandom]:
    """Create and open a file for reading and writing, and wait at the block's end until its content is on disk.

    A context manager, which also closes the file. If the block fails, there is no wait, and the caller must remove the
    file.

    Raises:
        FileExistsError: something is at the path already.
    """
    with open(path, "x+b") as file:
        yield file
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Wait until the file's content is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names of the folder's files are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, where the block creates a file; a context manager.

    If the block succeeds, that file replaces the one at `path`. If the block fails, that file is removed.
    """
    beside = temporary_beside(path)
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[io.BufferedRandom]:
    """Open a temporary file for writing and reading, which replaces the file at `path` if the block succeeds.

    A context manager. The new content is on disk before it replaces the old. If the block fails, the temporary file is
    removed, and the file at `path` stays as it was. So a reader always finds the whole old or the whole new content.
    """
    with replacing(path) as beside, synced_file(beside) as file:
        yield file


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all. Raises OSError."""
    with whole_file(path) as file:
        file.write(content)


def link_or_copy(file: Path, other: Path) -> None:
    """Give a file a second name by a hard link, or copy the file if there can be no link, as on another disk.

    Args:
        file: the file.
        other: the second name. If a file has this name already, the copy overwrites its content, which then also
            changes under other hard links to it.

    Raises:
        FileNotFoundError: The file, or the folder of the second name, is not there.
        OSError: The copy cannot be written, or `other` is a name of the same file already.
    """
    try:
        os.link(file, other)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, other)


def files_below(folder: str | Path) -> Iterator[Path]:
    """Yield the paths of all files below a folder, and of links that lead nowhere. Links to folders are followed.

    Raises:
        OSError: A folder is missing, or may not be read.
        InputError: A link leads to a folder that contains the link.
    """
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        yield from (Path(parent, name) for name in names)
        for inner in (Path(parent, name) for name in folders):
            if inner.is_symlink() and inner.resolve() in {around.resolve() for around in inner.parents}:
                raise InputError(f"{inner} leads to {inner.resolve()}, in which it is itself: remove that link")


def _refuse(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed. os.walk would skip the folder."""
    raise error


def content_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the hash of a file's content, or of the names and contents of all files below a folder, as hex.

    Names are relative to the folder. Links are followed. Empty folders, and links that lead nowhere, do not count.

    Args:
        path: the file or folder.
        algorithm: the name of one of hashlib's algorithms.

    Raises:
        OSError: A file or folder is missing or cannot be read.
        InputError: A link leads to a folder that contains the link.
    """
    if not path.is_dir():
        with open(path, "rb") as file:
            return stream_digest(file, algorithm)
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for inner in sorted(filter(Path.is_file, files_below(path))):
        digest.update(os.fsencode(inner.relative_to(path)) + f"\0{content_digest(inner, algorithm)}\n".encode())
    return digest.hexdigest()


def stream_digest(file: BinaryIO, algorithm: str = "sha256") -> str:
    """Return the hash of what is left to read, as hex. hashlib.file_digest needs Python 3.11."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    while piece := file.read(2**20):
        digest.update(piece)
    return digest.hexdigest()
