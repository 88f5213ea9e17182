"""The child's side of the launcher: the process of one rank, its output and its end."""

import atexit
import faulthandler
import gc
import io
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TextIO

from flyte_ddp.errors import StopRequested
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import from_exception
from flyte_ddp.launch.link import ParentLink
from flyte_ddp.launch.phases import STARTING
from flyte_ddp.launch.signals import STOP_SIGNALS

# The variables that the launcher sets when it starts the process that ranks are forked from
SET_FOR_RANKS = {"GOMP_SPINCOUNT"}


class _Lines(io.BufferedIOBase):
    """A file that forwards what is written to it, line by line. Any thread may write to it, and a finalizer, too.

    The output of a forked child, such as that of an inherited logging handler, goes straight to the original file. Its
    lines would end up in the middle of this process's, and a thread that the child does not have may hold the lock.
    """

    def __init__(self, hand_on: Callable[[str], None], file: TextIO):
        self._hand_on = hand_on
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
            self._hand_on(line.rstrip(b"\r").decode("utf-8", "backslashreplace"))
        return len(data)

    def end(self) -> None:
        """Forward a last line that has no end."""
        if any(self._begun):
            self.write(b"\n")


def _without_overwritten(line: bytes) -> bytes:
    """Return what a terminal would show of a line. A progress bar goes back to its beginning with a carriage return."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


@contextmanager
def printed_lines(out: Callable[[str], None], err: Callable[[str], None]) -> Iterator[None]:
    """Forward what the block prints to standard output and error, line by line, including a last one without an end.

    Output of native code bypasses this and goes straight to the file.
    """
    sinks = [_Lines(out, sys.stdout), _Lines(err, sys.stderr)]
    streams = [io.TextIOWrapper(sink, "utf-8", "backslashreplace", write_through=True) for sink in sinks]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            yield
        finally:
            for sink in sinks:
                sink.end()


def _let_go(connection: Connection) -> None:
    """Prepare a forked child of a rank, such as a loader worker, to end and to print by itself.

    SIGTERM ends the child again, and its output goes straight to the original files. The child's end of the parent's
    pipe is closed, so that the parent notices the end of the rank even if children live on.

    Args:
        connection: the rank's pipe to its parent.
    """
    connection.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def own_lock_of_tqdm() -> None:
    """Give tqdm's progress bars, if the user's code has imported tqdm, a lock of this process.

    Their own lock is a semaphore of the operating system, which would outlive the rank.
    """
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())


def serve(
    connection: Connection,
    environment: Environment,
    target: str,
    argument: Any,
    private: str,
    variables: dict[str, str],
) -> None:
    """Report the target's return value or failure, and end the process: the main function of a rank's process.

    Args:
        connection: the pipe to the parent.
        environment: this rank.
        target: the name of the function to call.
        argument: the function's argument.
        private: the run's private folder.
        variables: the parent's environment now. The process that ranks are forked from has that of the first launch.
    """
    for name in os.environ.keys() - variables.keys() - SET_FOR_RANKS:
        del os.environ[name]
    os.environ.update(variables)
    atexit.unregister(os._exit)  # fork_server.py has registered it
    gc.freeze()  # a collection need not look at the objects that the ranks share, which stay
    gc.enable()
    # listen() ends a rank with its parent, as if it were a daemon. But a rank may have children, such as loader workers
    multiprocessing.current_process().daemon = False
    if sys.platform == "linux":  # the loader workers of the user's code would otherwise each import torch anew
        multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=partial(_let_go, connection))
    os.setpgrp()  # a group with whatever this process starts, so that all of it can be ended
    link = ParentLink(connection, environment.rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, link.on_signal)
    # The process that this one was forked from blocks these signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    stacks = open(os.path.join(private, f"stack-{environment.rank}"), "w")  # noqa: SIM115 open until the end
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=link.listen, args=(private,), daemon=True).start()
    try:
        link.heartbeat(STARTING)
        with printed_lines(link.on_line, link.on_line):  # only the parent writes to the terminal
            value = pkgutil.resolve_name(target)(environment, link, argument)
        link.send("done", value)
    except StopRequested as stopped:
        link.send("stopped", str(stopped))
    except BaseException as error:
        link.send("failed", from_exception(error, environment.rank, environment.host))
    link.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the exit handlers of CUDA and gloo, which can hang or abort
