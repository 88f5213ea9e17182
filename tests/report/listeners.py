"""Observers of a user: one that notes what it hears and spoils it, and two that fail."""

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
