"""The grace: how long ranks may go on after a notice, such as SIGTERM, and what is saved when it ends.

Standard library only.
"""

import os

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, Event, RunStarted
from flyte_ddp.launch.phases import WRITING

GRACE_VARIABLE = "DDP_GRACE_SECONDS"  # the user's
POD_VARIABLE = "DDP_POD_GRACE"  # what a registered pod has asked for, or is known to have
USUAL_SECONDS = 30  # what Kubernetes and torchrun give
MOST_SECONDS = 3600
LAST_SECONDS = 5.0  # of a grace, in which the platform is told how the attempt ended


class Grace:
    """The time from a notice until whatever is left is killed, and the newest checkpoint that this process knows of.

    Attributes:
        seconds: the length of the grace, a whole number.
        has_started: whether the run's first step is next, or has begun.
    """

    def __init__(self, is_told: bool = True):
        """Read the grace from the environment variables; no checkpoint is known yet.

        Args:
            is_told: whether note() will be called for every event of rank 0, so that no checkpoint goes unnoticed.

        Raises:
            InputError: A variable is no such number.
        """
        given = [seconds for name in (GRACE_VARIABLE, POD_VARIABLE) if (seconds := _read(name))]
        self.seconds = min(given, default=USUAL_SECONDS)
        self.has_started = False
        self._is_told = is_told
        self._position: tuple[int, int] | None = None  # epoch and step, both from 0, of the newest checkpoint
        self._write_seconds = 0.0  # that it took
        self._last_seconds = min(LAST_SECONDS, self.seconds / 5)

    def note(self, event: Event) -> None:
        """Remember from an event of rank 0 that the run has started, or the position of its newest checkpoint.

        The position is an epoch and a step. The time that writing the checkpoint took is kept, too.
        """
        if isinstance(event, RunStarted):
            self.has_started = True
            if event.first_epoch or event.first_step:
                self._position = event.first_epoch, event.first_step
        elif isinstance(event, CheckpointWritten):
            self._position, self._write_seconds = (event.epoch, event.step), event.write_seconds

    def seconds_of_ranks(self) -> float:
        """Return how many seconds the ranks have from a notice that arrives now: none before the first step."""
        return self.seconds - self._last_seconds if self.has_started else 0.0

    def seconds_of_upload(self) -> float:
        """Return how many seconds after the notice the upload of a checkpoint is no longer waited for."""
        return self.seconds - self._last_seconds / 2

    def describe_end(self, phase: str, silent_seconds: float) -> str:
        """Return the message for ranks that were killed because they had not ended when the grace was over.

        The grace is the time from the request to stop. The message says what is lost and where a resume begins, if that
        is known. Before the first step, the ranks end at once, and the message says so.

        Args:
            phase: the phase of a rank that was still running, a constant of phases.py. For WRITING, the message
                estimates how much longer the writing would have taken.
            silent_seconds: the seconds since that rank's last sign of life.
        """
        if not self.has_started:
            return "ended at once, before the first step: an earlier checkpoint, if there is one, is as it was"
        longer = ""
        if phase == WRITING and self._write_seconds:
            longer = f", for about {max(1.0, self._write_seconds - silent_seconds):.0f} s more"
        did = f"still wrote a checkpoint or results{longer}" if phase == WRITING else "had not ended their step"
        begins = ", and a resume begins anew" if self._is_told else ""
        if self._position:
            epoch, step = self._position
            begins = f", and a resume begins before epoch {epoch + 1}, step {step + 1}"
        return (
            f"killed as the grace of {self.seconds} s ends, in which ranks {did}: what was trained since the newest "
            f"checkpoint is lost{begins}; if the platform gives longer, say so by {GRACE_VARIABLE}"
        )


def _read(name: str) -> int:
    """Return the whole number of seconds that an environment variable gives; 0 if the variable is not set.

    Raises:
        InputError: the variable is not a whole number from 0 to MOST_SECONDS (one hour).
    """
    text = os.environ.get(name, "0")
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SECONDS))
    if not is_number or int(text) > MOST_SECONDS:
        raise InputError(
            f"environment variable {name} must be a whole number of seconds, at least 0 and at most {MOST_SECONDS}, "
            f"got {text[:50]!r}: unset it, or set it to as many as there are from a SIGTERM to the end"
        )
    return int(text)
