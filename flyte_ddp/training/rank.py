"""The child's side of the launcher: one rank's process, its line to the parent, and its end."""

import faulthandler
import io
import os
import pkgutil
import resource
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Callable, TextIO

from flyte_ddp.training.environment import Environment
from flyte_ddp.training.errors import StopRequested
from flyte_ddp.training.events import Event, Printed
from flyte_ddp.training.failures import from_exception

ALIVE_SECONDS = 1.0  # between two signs of life, which cost a system call


class ParentLink:
    """The line to the parent: events from rank 0, signs of life from every rank, requests to stop from the parent."""

    def __init__(self, connection: Connection, rank: int):
        self.stop_requested = False
        self._connection, self._rank = connection, rank
        self._lock = threading.Lock()  # the checkpoint thread emits too
        self._next_alive = 0.0

    def emit(self, event: Event) -> None:
        if self._rank == 0:
            self.send("event", event)

    def alive(self) -> None:
        now = time.monotonic()
        if now >= self._next_alive:
            self._next_alive = now + ALIVE_SECONDS
            self.send("alive", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._connection.send((kind, content))

    def listen(self, private: str) -> None:
        """Waits for the parent's request to stop; when the parent is gone, so is this process, and its traces."""
        try:
            while True:
                self._connection.recv()
                self.stop_requested = True
        except (EOFError, OSError):
            shutil.rmtree(private, ignore_errors=True)
            os._exit(1)

    def on_line(self, text: str) -> None:
        self.send("event", Printed(self._rank, text))

    def on_signal(self, *_: Any) -> None:
        self.stop_requested = True


class PrintedLines(io.TextIOBase):
    """Takes the place of standard output or error, and hands on what is printed line by line.

    What native code writes goes past this, straight to the file.
    """

    def __init__(self, hand_on: Callable[[str], None], file: TextIO):
        self._hand_on, self._file, self._begun = hand_on, file, ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._hand_on(line)
        return len(text)


def serve(connection: Connection, environment: Environment, target: str, argument: Any, private: str) -> None:
    """The main function of a rank's process; reports the function's value or failure, and ends the process."""
    link = ParentLink(connection, environment.rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, link.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked in the process that this one was forked from
    stacks = open(os.path.join(private, f"stack-{environment.rank}"), "w")  # noqa: SIM115 open until the end
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=link.listen, args=(private,), daemon=True).start()
    try:
        link.alive()
        # to the parent, the only one that writes to the terminal
        sys.stdout, sys.stderr = (PrintedLines(link.on_line, file) for file in (sys.stdout, sys.stderr))
        value = pkgutil.resolve_name(target)(environment, link, argument)
        link.send("done", value)
    except StopRequested as stopped:
        link.send("stopped", str(stopped))
    except BaseException as error:
        link.send("failed", from_exception(error, environment.rank, environment.host))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the exit handlers of CUDA and gloo, which can hang or abort
