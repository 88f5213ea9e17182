"""The line of a rank that was started by others than the launcher: straight to observers in its own process."""

import threading
from typing import Any, Callable

from flyte_ddp.training.events import Event


class DirectLink:
    """Leads events to observers in this process; there is no parent to talk to."""

    def __init__(self, on_event: Callable[[Event], None]):
        self.stop_requested = False
        self._on_event, self._lock = on_event, threading.Lock()  # the checkpoint thread emits too

    def emit(self, event: Event) -> None:
        with self._lock:
            self._on_event(event)

    def alive(self) -> None:
        pass

    def on_signal(self, *_: Any) -> None:
        self.stop_requested = True
