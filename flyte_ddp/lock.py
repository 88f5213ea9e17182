"""A folder that is one holder's at a time. Standard library only."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = ".lock"
_held: dict[Path, object] = {}  # by this process, whose own locks do not keep each other out


class HeldError(Exception):
    """Another has it; the message names that one."""


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Nobody else holds the folder while the block runs; false where the file system has no locks.

    The system releases it when this process ends, in whatever way, though children of it live on. Raises HeldError, and
    OSError if the folder cannot be written to, or has been removed.
    """
    path = folder.resolve() / LOCK
    token = object()
    if _held.setdefault(path, token) is not token:  # opening the file, and closing it, would release it
        raise HeldError(f"process {os.getpid()}, this one")
    try:
        with _locked(path) as (file, is_locked):
            try:
                file.truncate(0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
                file.flush()
                yield is_locked
            finally:
                with suppress(OSError):  # who comes next takes the file as it is
                    path.unlink()
    finally:
        del _held[path]


@contextmanager
def _locked(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """The file, which is at the path, not one that its holder has just removed, and whether it is locked."""
    while True:
        # not what a link leads to
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(handle, "r+", encoding="utf-8", errors="replace") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise HeldError(file.read(200) or "another process") from None
            except OSError:
                yield file, False
                return
            if _is_at(path, file):
                yield file, True
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False
