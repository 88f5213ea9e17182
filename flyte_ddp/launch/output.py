"""The output of a process: its printed lines, and the lock of its progress bars."""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO


class _Lines(io.BufferedIOBase):
    """A file that forwards what is written to it, line by line. Any thread may write to it, and a finalizer, too.

    What a forked child writes, as by an inherited logging handler, goes straight to the original file. Here the child's
    lines would end up in the middle of this process's, and a thread that the child does not have may hold the lock.
    """

    def __init__(self, forward: Callable[[str], None], file: TextIO):
        """Wrap nothing but the file's name and descriptor; forward(line) gets each line, without its end."""
        self._forward = forward
        self._file = file
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._begun = [b""]  # the pieces of an unfinished line

    @property
    def name(self) -> str:
        return self._file.name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        """Pass each line that these bytes complete to the callback, and return len(data).

        An unfinished line is kept for the next call. Of a line that carriage returns overwrite, such as a progress
        bar's, only the last text is passed. A process forked from this one writes the bytes to the original file
        instead.
        """
        if os.getpid() != self._process:
            return os.write(self.fileno(), data)
        with self._lock:
            self._begun.append(bytes(data))
            if b"\n" not in data and b"\r" not in data:
                return len(data)
            pieces = self._begun
            self._begun = []
            *lines, begun = map(_without_overwritten, b"".join(pieces).split(b"\n"))
            self._begun.insert(0, begun)
        for line in lines:
            self._forward(line.rstrip(b"\r").decode("utf-8", "backslashreplace"))
        return len(data)

    def end(self) -> None:
        """Forward a last line that has no end."""
        if any(self._begun):
            self.write(b"\n")


def _without_overwritten(line: bytes) -> bytes:
    """Return what a terminal would show of a line: what follows the last carriage return, as progress bars write it."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


@contextmanager
def capture_lines(out: Callable[[str], None], err: Callable[[str], None]) -> Iterator[None]:
    """Call out(line) and err(line) for lines that Python code prints in a with statement, in place of printing them.

    The lines to stdout go to `out`, those to stderr to `err`, without their ends. An unfinished last line comes when
    the block ends. Of a line that carriage returns overwrite, such as a progress bar's, only the last text comes.
    Output of native code and of forked children goes straight to the original file. `out` and `err` must not print to
    sys.stdout or sys.stderr, because they would be called for that line, too.
    """
    sinks = [_Lines(out, sys.stdout), _Lines(err, sys.stderr)]
    streams = [io.TextIOWrapper(sink, "utf-8", "backslashreplace", write_through=True) for sink in sinks]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            yield
        finally:
            for sink in sinks:
                sink.end()


def own_lock_of_tqdm() -> None:
    """Replace the lock of tqdm's progress bars by a lock of threads, if the user's code has imported tqdm.

    tqdm's own lock is a semaphore of the operating system, which would outlive the rank. Call this function after each
    import of the user's code.
    """
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())
