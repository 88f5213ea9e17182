"""The connection from a rank to the outside: to the parent that launched it, or directly to observers."""

import os
import pickle
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from flyte_ddp.events import Event, Printed
from flyte_ddp.launch.grace import Saved
from flyte_ddp.launch.hangs import Answer
from flyte_ddp.launch.launch_compat import standing
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.launch.phases import STARTING, STEPPING

ALIVE_SECONDS = 1.0  # between two heartbeats, which cost a system call each


class Link:
    """What every rank's job is given. Whether its events arrive anywhere is not the job's concern.

    is_heard: whether events of this rank arrive anywhere; if not, expensive ones need not be computed.
    """

    def __init__(self, is_heard: bool = False):
        self.stop_requested = False
        self.is_heard = is_heard

    def emit(self, event: Event) -> None:
        pass

    def heartbeat(self, phase: str = STEPPING) -> None:
        """Called after each step by each rank, so that a hang can be told from slow work.

        phase: which time-out counts until the next call. One that others are in, too, until this rank meets them: they
        wait for it.
        """

    def on_signal(self, *_: Any) -> None:
        self.stop_requested = True


class ParentLink(Link):
    """The pipe to the parent: events from rank 0, heartbeats from every rank, requests from the parent."""

    def __init__(self, connection: Connection, rank: int):
        super().__init__(is_heard=rank == 0)
        self._connection = connection
        self._rank = rank
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()  # the checkpoint thread emits too
        self._phase = STARTING
        self._next_alive = 0.0

    def emit(self, event: Event) -> None:
        if self.is_heard:
            self.send("event", event)

    def heartbeat(self, phase: str = STEPPING) -> None:
        now = time.monotonic()
        if phase != self._phase or now >= self._next_alive:
            self._phase = phase
            self._next_alive = now + ALIVE_SECONDS
            self.send("heartbeat", (phase, peak_memory()))

    def send(self, kind: str, content: Any) -> None:
        """Leaves it to another sender if there is one: it may be this very thread, in which a finalizer prints."""
        self._waiting.append(pickle.dumps((kind, content)))
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._pass_on()
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Return when all has been sent."""
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        try:
            while self._waiting:
                self._connection.send_bytes(self._waiting.popleft())
        except OSError:  # the parent is gone: listen, which sees that too, ends this rank
            threading.Event().wait()

    def listen(self, private: str) -> None:
        """Answers the parent's requests; when the parent is gone, removes its folder and ends this rank."""
        try:
            while True:
                if self._connection.recv() == "standing":
                    self.send("standing", Answer(*standing(self._rank)))
                else:
                    self.stop_requested = True
        except (EOFError, OSError):
            shutil.rmtree(private, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    def on_line(self, text: str) -> None:
        self.send("event", Printed(self._rank, text))


class DirectLink(Link):
    """Passes events to observers in this process, if any; for ranks that another launcher has started.

    steps: counts signs of life, for watched. phase: of the last one. saved: what this rank has heard of it.
    """

    def __init__(self, on_event: Callable[[Event], None] | None):
        super().__init__(is_heard=on_event is not None)
        self._on_event = on_event
        self._lock = threading.Lock()  # the checkpoint thread emits events, too
        self.steps = 0
        self.phase = STARTING
        self.saved = Saved(self.is_heard)

    def heartbeat(self, phase: str = STEPPING) -> None:
        self.steps = self.steps + 1
        self.phase = phase

    def emit(self, event: Event) -> None:
        self.steps += 1
        self.saved.note(event)
        if self._on_event:
            with self._lock:
                self._on_event(event)
