"""The connection from a rank to the outside: to the parent that launched it, or directly to observers."""

import math
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
from flyte_ddp.launch.grace import Grace
from flyte_ddp.launch.launch_compat import locate_rank
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.launch.phases import STARTING, STEPPING

ALIVE_SECONDS = 1.0  # time between two heartbeats, each of which costs a system call
# Linux puts so few bytes into a socket pair whole or not at all, and up to 16,384 bytes multiprocessing writes them at
# once with their length. So the parent, which reads piece by piece, never waits for the rest of one, though the rank
# may be stopped while it sends.
PIECE_BYTES = 16_000


class Link:
    """The connection that every rank's job gets. This class itself is one that leads nowhere.

    Attributes:
        is_heard: whether events of this rank arrive anywhere; if not, expensive ones need not be computed.
        stop_requested: whether this rank alone was asked to stop. The job tells the other ranks.
    """

    def __init__(self, is_heard: bool = False):
        self.stop_requested = False
        self.is_heard = is_heard

    def emit(self, event: Event) -> None:
        """Send an event to the observers, if this rank's arrive anywhere. Any thread may call it."""

    def heartbeat(self, phase: str = STEPPING) -> None:
        """Give a sign of life, from any thread. Each rank does so after each step: one that does not for long, hangs.

        Args:
            phase: what this rank does until the next call, one of phases.py, which decides the time-out.
        """

    def on_signal(self, *_: Any) -> None:
        """Handle a signal: from now on the rank is asked to stop."""
        self.stop_requested = True


class ParentLink(Link):
    """The pipe to the parent: events of rank 0, and of every rank its output, heartbeats and answers to requests."""

    def __init__(self, connection: Connection, rank: int, local_rank: int):
        super().__init__(is_heard=rank == 0)
        self._connection = connection
        self._rank = rank
        self._local_rank = local_rank
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()  # the checkpoint thread emits too
        self._phase = STARTING
        self._next_alive = 0.0

    def emit(self, event: Event) -> None:
        if self.is_heard:
            self.send("event", event)

    def heartbeat(self, phase: str = STEPPING) -> None:
        """Send phase and peak memory, at most once per ALIVE_SECONDS and phase."""
        now = time.monotonic()
        if phase != self._phase or now >= self._next_alive:
            self._phase = phase
            self._next_alive = now + ALIVE_SECONDS
            self.send("heartbeat", (phase, peak_memory()))

    def send(self, kind: str, content: Any) -> None:
        """Pickle (kind, content), and send it to the parent after all earlier messages. Any thread may call the method.

        The call waits while the pipe is full. If another call is sending at this moment, this call queues its message
        and returns at once; the other call then sends the message. If the parent is gone, the call never returns,
        because listen() kills this rank.

        Args:
            kind: what the message is, such as "event" or "done".
            content: any object that can be pickled.
        """
        # The other call may be in the same thread: a finalizer may print while the thread sends
        self._waiting.append(pickle.dumps((kind, content)))
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._send_waiting()
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Wait until all messages are sent."""
        with self._lock:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the waiting messages, oldest first, or wait for ever if the parent is gone. The caller has the lock."""
        try:
            while self._waiting:
                message = self._waiting.popleft()
                for end in range(PIECE_BYTES, len(message) + PIECE_BYTES, PIECE_BYTES):
                    is_last = end >= len(message)
                    self._connection.send_bytes(bytes([is_last]) + message[end - PIECE_BYTES : end])
        except OSError:  # the parent is gone; listen() notices that, too, and ends this rank
            threading.Event().wait()

    def listen(self, private: str) -> None:
        """Serve the parent's requests until the parent is gone, then kill this rank and the processes that it started.

        A thread of the rank runs this method, which never returns. To the request "locate", it sends an Answer, which
        says where the rank is. Any other request ("stop") sets stop_requested to True.

        Args:
            private: the parent's temporary folder, which this method removes when the parent is gone.
        """
        try:
            while True:
                if self._connection.recv() == "locate":
                    self.send("answer", locate_rank(self._local_rank))
                else:
                    self.stop_requested = True
        except (EOFError, OSError):
            shutil.rmtree(private, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    def on_line(self, text: str) -> None:
        """Send a line that this rank has printed."""
        self.send("event", Printed(self._rank, text))


class DirectLink(Link):
    """A link that passes events to observers in this process, if any, for ranks that another launcher has started.

    Attributes:
        steps: the number of signs of life, which are heartbeats and events. The watchdog watches it.
        phase: the phase of the last heartbeat.
        grace: the grace of this process, which notes the events.
        until: the time, as of time.monotonic(), until which a checkpoint may be uploaded after a signal.
    """

    def __init__(self, on_event: Callable[[Event], None] | None):
        """Pass events to on_event, one at a time; None on ranks without observers. Raises InputError: see Grace."""
        super().__init__(is_heard=on_event is not None)
        self._on_event = on_event
        self._lock = threading.Lock()  # the checkpoint thread emits events, too
        self.steps = 0
        self.phase = STARTING
        self.grace = Grace(self.is_heard)
        self.until = math.inf

    def on_signal(self, *_: Any) -> None:
        """Handle a signal: from now on the rank is asked to stop, and its grace runs."""
        self.until = min(self.until, time.monotonic() + self.grace.seconds_of_upload())
        super().on_signal()

    def heartbeat(self, phase: str = STEPPING) -> None:
        self.steps += 1
        self.phase = phase

    def emit(self, event: Event) -> None:
        self.steps += 1
        self.grace.note(event)
        if self._on_event:
            with self._lock:
                self._on_event(event)
