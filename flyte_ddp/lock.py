"""A lock that gives a folder to one process at a time. Standard library only."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = ".lock"
_held: dict[Path, object] = {}  # this process's locks: file locks of one process do not exclude each other


class HeldError(Exception):
    """The folder belongs to another holder, which the message names."""


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, the file .lock in the folder, while the block runs; a context manager.

    The function never waits for the lock. It writes this process's id and host into the file, for the HeldError of
    other processes, and removes the file at the end of the block. If this process is killed, the operating system
    releases the lock, even if children of the process live on.

    Yields:
        True, or False if the file system has no locks: then nothing keeps other processes out.

    Raises:
        HeldError: Another process, or another block in this process, holds the lock.
        OSError: The folder cannot be written to, or is not there.
    """
    path = folder.resolve() / LOCK
    token = object()
    # Opening and closing the file again would release this process's lock, so the dict is asked first
    if _held.setdefault(path, token) is not token:
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
                with suppress(OSError):  # the next holder can use a file that is still there
                    path.unlink()
    finally:
        del _held[path]


@contextmanager
def _locked(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """Create the file at the path if there is none, and lock it while the block runs; a context manager.

    The function never waits for the lock, and does not remove the file. Only other processes are kept out: a second
    block in this process for the same path would succeed, and release the lock when it ends.

    Yields:
        The open file, and whether the file is locked: False if the file system has no locks.

    Raises:
        HeldError: Another process has the lock. The message is what that process has written into the file.
        OSError: The file cannot be opened, or is a symbolic link.
    """
    while True:
        # O_NOFOLLOW: never lock the target of a symlink
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(handle, "r+", encoding="utf-8", errors="replace") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise HeldError(file.read(200) or "another process") from None
            except OSError:
                yield file, False
                return
            if _is_at(path, file):  # else the previous holder has just removed the file, whose lock keeps nobody out
                yield file, True
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False
