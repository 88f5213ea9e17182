"""Observers of a user: one that notes what it hears and spoils it, two that fail, and one that is waited for."""

import signal
import threading
from typing import Any

NOTED: list[Any] = []


class Notes:
    def on_epoch_finished(self, event: Any) -> None:
        NOTED.append(event.test.pop("loss"))

    def on_run_failed(self, event: Any) -> None:
        NOTED.append(event.reason)


class Fails:
    def on_epoch_finished(self, event: Any) -> None:
        raise SystemExit(f"epoch {event.epoch}")


class CannotBeMade:
    def __init__(self, folder: str):
        pass


class Interrupts:
    """Is pressed Ctrl-C upon while the end waits for it."""

    def on_run_finished(self, event: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Event().wait()
