"""The files that a forked process has inherited, in which it gets offsets of its own."""

import fcntl
import os
import stat
import sys
from contextlib import suppress
from functools import cache


@cache
def reopen_in_forks() -> None:
    """Make every process that this one forks later reopen its files, which a Dataset may have opened before.

    On Linux alone. A second call does nothing.
    """
    if sys.platform == "linux":
        os.register_at_fork(after_in_child=reopen_files)


def reopen_files() -> None:
    """Reopen each regular file that this process has open for reading only, at the same offset and descriptor.

    A forked process shares offsets with its parent and siblings, so one process would move the offset between another's
    seek and read. Files that are open for writing stay shared, since processes append to them in turn. A file that
    cannot be reopened stays shared, too, and without /proc nothing happens.
    """
    with suppress(OSError):  # /proc may not be mounted
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the listing itself is closed by now, and other users' files may be refused
                _reopen(descriptor)


def _reopen(descriptor: int) -> None:
    """Open a descriptor's file anew, at the same offset, so that no other process shares the offset.

    The descriptor keeps its number. A file that is not a regular one, or is open for writing, stays as it is.

    Raises:
        OSError: The descriptor is closed, or its file cannot be opened again.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
        return
    own = os.open(f"/proc/self/fd/{descriptor}", flags)
    try:
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(own)
