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
from multiprocessing.connection import Connection
from typing import Any, Callable, TextIO

from flyte_ddp.errors import StopRequested
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import from_exception
from flyte_ddp.launch.link import ParentLink


class PrintedLines(io.TextIOBase):
    """Replaces standard output or error and passes on what is printed, line by line.

    Output of native code bypasses this and goes straight to the file.
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


def _let_go() -> None:
    """Undoes in a forked child of the rank what keeps it from ending on SIGTERM, and from printing on its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def serve(connection: Connection, environment: Environment, target: str, argument: Any, private: str) -> None:
    """The main function of a rank's process: reports the target's return value or failure, and ends the process."""
    atexit.unregister(os._exit)  # see fork_server.py
    gc.freeze()  # what the ranks share stays: a collection need not look at it
    gc.enable()
    # It ends with its parent as a daemon does, see listen, but may have children, such as loader workers and pools
    multiprocessing.current_process().daemon = False
    os.register_at_fork(after_in_child=_let_go)
    link = ParentLink(connection, environment.rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    signal.signal(signal.SIGTERM, link.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked in the process that this one was forked from
    stacks = open(os.path.join(private, f"stack-{environment.rank}"), "w")  # noqa: SIM115 open until the end
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=link.listen, args=(private,), daemon=True).start()
    try:
        link.alive()
        # to the parent, the only one that writes to the terminal
        sys.stdout, sys.stderr = (PrintedLines(link.on_line, file) for file in (sys.stdout, sys.stderr))
        try:
            value = pkgutil.resolve_name(target)(environment, link, argument)
        finally:
            for child in multiprocessing.active_children():  # the recipe's own, such as a pool's that was left open
                child.kill()
        link.send("done", value)
    except StopRequested as stopped:
        link.send("stopped", str(stopped))
    except BaseException as error:
        link.send("failed", from_exception(error, environment.rank, environment.host))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the exit handlers of CUDA and gloo, which can hang or abort
