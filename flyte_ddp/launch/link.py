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

ALIVE_SECONDS = 1.0  # time between two heartbeats, each of which costs a system call


class Link:
    """The connection that every rank's job gets. Whether its events arrive anywhere is not the job's concern.

    Attributes:
        is_heard: whether events of this rank arrive anywhere; if not, expensive ones need not be computed.
        stop_requested: whether the rank was asked to stop.
    """

    def __init__(self, is_heard: bool = False):
        self.stop_requested = False
        self.is_heard = is_heard

    def emit(self, event: Event) -> None:
        pass

    def heartbeat(self, phase: str = STEPPING) -> None:
        """Give a sign of life. Each rank calls it after each step, so that a hang can be told from slow work.

        Args:
            phase: decides which time-out counts until the next call. If other ranks are in it, too, they wait for this
                rank.
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
        """Send a message, or leave it to another sender that is at work.

        The other sender may be this very thread, in which a finalizer prints.
        """
        self._waiting.append(pickle.dumps((kind, content)))
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._pass_on()
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Wait until all messages are sent."""
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        try:
            while self._waiting:
                self._connection.send_bytes(self._waiting.popleft())
        except OSError:  # the parent is gone; listen() notices that, too, and ends this rank
            threading.Event().wait()

    def listen(self, private: str) -> None:
        """Answer the parent's requests. When the parent is gone, remove its folder and end this rank."""
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
    """A link that passes events to observers in this process, if any, for ranks that another launcher has started.

    Attributes:
        steps: the number of signs of life, which the watchdog watches.
        phase: the phase of the last sign of life.
        saved: what this rank knows of saved checkpoints.
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
