"""A slow observer in a thread of its own, which never stops, fails or noticeably slows training."""

import contextvars
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flyte_ddp.events import Observer
from flyte_ddp.launch.failures import describe_error
from flyte_ddp.report.console import warn

# The niceness of observers' threads: the scheduler gives a rank's thread three times their weight. At 19 it would be
# seventy times: where other programs use the cores, W&B would still be starting after the end of a short training.
NICENESS = 5


class IncompleteError(Exception):
    """An error whose message explains everything, so that the type's name is not shown."""


class Background(Observer):
    """A slow observer that a thread of its own creates, calls and closes.

    Events are lost if the observer fails on them, or if they arrive while the queue is full; close() warns of that
    once.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Observer],
        close_seconds: float,
        capacity: int = 10_000,
        abandon: Callable[[], None] = lambda: None,
    ):
        """Start the thread.

        Args:
            name: what warnings call the observer.
            make: creates the observer. The thread calls it, so it may wait for imports and connections.
            close_seconds: how long close() waits for queued events before it calls abandon.
            capacity: how many events may be queued.
            abandon: stops an observer that close() could not wait for.
        """
        self.name = name
        self._close_seconds = close_seconds
        self._capacity = capacity
        self._abandon = abandon
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lost = 0
        self._reason = ""
        self._observer: Observer | None = None
        self._is_made = threading.Event()
        self._is_closing = False
        self._done = self._start(self._work, make)

    def __call__(self, event: Any) -> None:
        if self._events.qsize() < self._capacity:
            self._events.put(event)
        else:
            self._lost += 1
            self._reason = self._reason or "too slow"

    def wait_until_made(self) -> None:
        """Wait until the observer is created, or its creation has failed. close() then waits that much shorter."""
        began = time.monotonic()
        self._is_made.wait(self._close_seconds)
        self._close_seconds -= time.monotonic() - began

    def close(self) -> None:
        """Close the observer after it has handled all queued events, and wait for this.

        After close_seconds, the method stops waiting and calls abandon(); both are the constructor's arguments. One
        warning is printed if events were lost, or if the observer was abandoned, could not be created, or failed. No
        error of the observer is raised. If Ctrl-C ends the wait, call this method again.
        """
        deadline = time.monotonic() + max(0.0, self._close_seconds)
        if not self._is_closing:
            self._is_closing = True
            self._events.put(None)
        self._done.wait(max(0.0, self._close_seconds))
        if self._done.is_set() and self._observer:
            observer = self._observer
            self._observer = None
            # A new thread has normal priority, because training no longer needs the CPU
            self._done = self._start(self._try, observer.close)
            self._done.wait(max(0.0, deadline - time.monotonic()))
        if not self._done.is_set():
            self._reason = self._reason or f"not ready within {self._close_seconds:.3g} s"
            with suppress(Exception):
                self._abandon()
        if self._reason:
            lost = self._lost + max(0, self._events.qsize() - 1)
            warn(
                f"{self.name} is incomplete ({self._reason})"
                f"{f'; lost: {lost} events' if lost else ''}. Training was not affected."
            )
            self._reason = ""

    def _start(self, work: Callable[..., object], *arguments: Any) -> threading.Event:
        """Start work(*arguments) in a new daemon thread, and return an event that is set when `work` has ended.

        The thread gets a copy of this thread's context variables. If `work` raises an error, the event is set, too.
        """
        done = threading.Event()  # Thread.join() takes a thread for ended after an interrupt

        def run() -> None:
            try:
                work(*arguments)
            finally:
                done.set()

        # A Deck cannot be published without Flyte's context
        threading.Thread(target=contextvars.copy_context().run, args=(run,), name=self.name, daemon=True).start()
        return done

    def _work(self, make: Callable[[], Observer]) -> None:
        give_way()
        try:
            self._observer = observer = make()
        except (Exception, SystemExit) as error:  # SystemExit would end the thread without a message
            self._note(error)
            warn(f"{self.name} cannot be started ({self._reason}). Training goes on without it.")
            return
        finally:
            self._is_made.set()
        for event in iter(self._events.get, None):
            self._lost += not self._try(observer, event)

    def _try(self, work: Callable[..., Any], *arguments: Any) -> bool:
        """Call work(*arguments), and return whether it raises no error. close() warns of the first error."""
        try:
            work(*arguments)
        except Exception as error:
            self._note(error)
            return False
        return True

    def _note(self, error: BaseException) -> None:
        name = "" if isinstance(error, IncompleteError) else f"{type(error).__name__}: "
        self._reason = self._reason or f"{name}{one_line(error)}".rstrip(": ")


def give_way() -> None:
    """Lower the CPU priority of this thread and of the processes that it starts, so that the ranks come first."""
    if sys.platform == "linux":  # elsewhere this would change the priority of the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, shortened, without the W&B key and the passwords of addresses."""
    text = " ".join(describe_error(error).split())
    key = os.environ.get("WANDB_API_KEY")
    return (text.replace(key, "(key)") if key else text)[:400]
