"""Writing files so that a reader never sees half of one. Standard library only."""

import hashlib
import io
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flyte_ddp.errors import InputError

LEFTOVER_SECONDS = 3600.0


@contextmanager
def writing_to(directory: str | Path, variable: str) -> Iterator[None]:
    """Turns the errors of a full, read-only or forbidden disk into one InputError that names the folder.

    variable is the environment variable with which the user can choose another folder.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {directory}: {error.strerror or error}; free or allow space there, "
            f"or set {variable} to another folder"
        ) from None


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that no other process uses (for os.replace) and that remove_leftovers recognises."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def remove_leftovers(directory: str | Path) -> None:
    """Removes what killed processes left half-written here: temporary files untouched for an hour."""
    for path in Path(directory).glob(".*.partial"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def synced_file(path: Path) -> Iterator[io.BufferedWriter]:
    """A new file that is on disk, not just in the cache, when the block ends."""
    with open(path, "xb") as file:
        yield file
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Returns when what was written is on disk."""
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes a file beside path and renames it: path always holds either the old or the new content. Raises OSError."""
    beside = temporary_beside(path)
    try:
        with synced_file(beside) as file:
            for piece in pieces:
                file.write(piece)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def content_digest(path: Path) -> str:
    """SHA-256 as hex over the content of a file, or over the names and contents of all files below a folder."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        with open(file, "rb") as content:
            while piece := content.read(2**20):
                digest.update(piece)
    return digest.hexdigest()
