"""Gives a slow observer a thread of its own, so that looking on never stops, fails or noticeably slows training."""

import contextvars
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Callable, Optional, Protocol

from flyte_ddp.report.console import say


class Observer(Protocol):
    """Receives every event, in order."""

    def __call__(self, event: Any) -> None: ...

    def close(self) -> None:
        """Nothing more will happen."""


class Incomplete(Exception):
    """Its message says all that there is to say."""


class Background:
    """An observer in front of a slow one, which is made, told and closed in a thread of its own.

    Events that the slow one fails on, and those that come while its queue is full, are lost; close() says so, once.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Observer],
        close_seconds: float,
        capacity: int = 10_000,
        abandon: Callable[[], None] = lambda: None,
    ):
        """make is called in the thread, so that imports and connections are waited for there; close() waits at most
        close_seconds for what is still queued, then calls abandon."""
        self.name, self._close_seconds, self._capacity, self._abandon = name, close_seconds, capacity, abandon
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lost, self._reason = 0, ""
        self._observer: Optional[Observer] = None
        self._thread = self._start(self._work, make)

    def __call__(self, event: Any) -> None:
        if self._events.qsize() < self._capacity:
            self._events.put(event)
        else:
            self._lost += 1
            self._reason = self._reason or "too slow"

    def close(self, *last: Any) -> None:
        """Tells the last events and waits for all to be done, but not for ever: as a daemon no thread of this keeps the
        process from ending. Training being over, the end is not left to the thread that gives way to it."""
        deadline = time.monotonic() + self._close_seconds
        self._events.put(None)
        self._thread.join(self._close_seconds)
        if not self._thread.is_alive() and self._observer:
            self._thread = self._start(self._finish, *last)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        else:
            self._lost += len(last)
        if self._thread.is_alive():
            self._reason = self._reason or f"not ready within {self._close_seconds:g} s"
            with suppress(Exception):
                self._abandon()
        if self._reason:
            lost = self._lost + max(0, self._events.qsize() - 1)
            say(
                f"Warning: {self.name} is incomplete ({self._reason})"
                f"{f'; lost: {lost} events' if lost else ''}. Training was not affected."
            )

    def _start(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        # Flyte's context, without which a Deck cannot be published, goes with the thread
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(work, *arguments), name=self.name, daemon=True)
        thread.start()
        return thread

    def _work(self, make: Callable[[], Observer]) -> None:
        give_way()
        try:
            self._observer = make()
        except Exception as error:
            self._note(error)
            return
        for event in iter(self._events.get, None):
            self._tell(self._observer, event)

    def _finish(self, *last: Any) -> None:
        assert self._observer
        for event in last:
            self._tell(self._observer, event)
        try:
            self._observer.close()
        except Exception as error:
            self._note(error)

    def _tell(self, observer: Observer, event: Any) -> None:
        try:
            observer(event)
        except Exception as error:
            self._lost += 1
            self._note(error)

    def _note(self, error: Exception) -> None:
        name = "" if isinstance(error, Incomplete) else f"{type(error).__name__}: "
        self._reason = self._reason or f"{name}{one_line(error)}".rstrip(": ")


def give_way() -> None:
    """Lets this thread, and the processes that it starts, have only what the ranks leave of the processor."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own: this would be the whole process's
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def one_line(error: BaseException) -> str:
    """The message, short, and without the W&B key, whatever put it there."""
    text = " ".join(str(error).split())
    key = os.environ.get("WANDB_API_KEY")
    return (text.replace(key, "(key)") if key else text)[:400]
