"""How long a training has yet to go, by the pace of this attempt."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flyte_ddp.events import EpochFinished, RunStarted, StepLogged

FIRST_SECONDS = 5.0  # without an estimate: the first steps are not like the others


class TimeLeft:
    """Passes events on to a listener, those of steps with their seconds_left.

    A step takes its share of all that has happened since the first one, checkpoints included, without evaluations.
    These are counted apart, by their share in the steps that have been evaluated: the next may be near or far.
    """

    def __init__(self, listen: Callable[[Any], None], now: Callable[[], float] = time.monotonic):
        self._listen, self._now = listen, now

    def __call__(self, event: Any) -> None:
        if isinstance(event, RunStarted):
            self._run, self._began = event, self._now()
            self._first = self._evaluated = event.first_epoch * event.steps_per_epoch + event.first_step
            self._evaluating = 0.0
        elif isinstance(event, EpochFinished):
            self._evaluated = round(event.position * self._run.steps_per_epoch)
            self._evaluating += event.evaluate_seconds
        elif isinstance(event, StepLogged):
            event = replace(event, seconds_left=self._left(event))
        self._listen(event)

    def _left(self, event: StepLogged) -> float | None:
        """None in the first seconds."""
        run, seconds = self._run, self._now() - self._began
        done = event.epoch * run.steps_per_epoch + event.step
        steps = max(done, run.epochs * run.steps_per_epoch)  # an own loop's epochs may be longer than its first one
        if seconds < FIRST_SECONDS:
            return None
        stepping = (seconds - self._evaluating) / (done - self._first) * (steps - done)
        evaluating = self._evaluating / max(1, self._evaluated - self._first) * (steps - self._evaluated)
        return round(stepping + evaluating, 1)
