"""The grace: how long ranks may go on after a notice, such as SIGTERM. Standard library only.

This module also has the message for a grace that was too short.
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


def grace_seconds() -> int:
    """Return the seconds from a notice until whatever is left is killed: the pod's, or fewer if the user says so.

    Raises:
        InputError: A variable is no such number.
    """
    given = [seconds for name in (GRACE_VARIABLE, POD_VARIABLE) if (seconds := _read(name))]
    return min(given, default=USUAL_SECONDS)


def _read(name: str) -> int:
    """Return a variable's whole number; 0 if it is not set."""
    text = os.environ.get(name, "0")
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SECONDS))
    if not is_number or int(text) > MOST_SECONDS:
        raise InputError(
            f"environment variable {name} must be a whole number of seconds, at least 0 and at most {MOST_SECONDS}, "
            f"got {text[:50]!r}: unset it, or set it to as many as there are from a SIGTERM to the end"
        )
    return int(text)


def seconds_of_ranks(grace: float) -> float:
    """Return how many seconds of a grace the ranks have."""
    return grace - min(LAST_SECONDS, grace / 5)


def seconds_of_upload(grace: float) -> float:
    """Return how many seconds of a grace there are until the upload of a checkpoint is no longer waited for."""
    return grace - min(LAST_SECONDS, grace / 5) / 2


class Saved:
    """The newest checkpoint of a run, as far as this process knows.

    Attributes:
        has_started: whether the run's first step is next, or has begun.
    """

    def __init__(self, is_told: bool = True):
        """Begin without a checkpoint. is_told: whether this process is told of checkpoints."""
        self.has_started, self._is_told = False, is_told
        self._position: tuple[int, int] | None = None  # epoch and step, both from 0, of the newest checkpoint
        self._write_seconds = 0.0  # that it took

    def note(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.has_started = True
            if event.first_epoch or event.first_step:
                self._position = event.first_epoch, event.first_step
        elif isinstance(event, CheckpointWritten):
            self._position, self._write_seconds = (event.epoch, event.step), event.write_seconds

    def end_of_grace(self, grace: float, phase: str, seconds: float) -> str:
        """Return what is said of ranks that have not ended in time.

        Args:
            grace: in seconds.
            phase: what a rank did.
            seconds: since when.
        """
        if not self.has_started:
            return "ended at once, before the first step: an earlier checkpoint, if there is one, is as it was"
        longer = ""
        if phase == WRITING and self._write_seconds:
            longer = f", for about {max(1.0, self._write_seconds - seconds):.0f} s more"
        did = f"still wrote a checkpoint or results{longer}" if phase == WRITING else "had not ended their step"
        return (
            f"killed as the grace of {grace:g} s ends, in which ranks {did}: what was trained since the newest "
            f"checkpoint is lost{self._begins()}; if the platform gives longer, say so by {GRACE_VARIABLE}"
        )

    def _begins(self) -> str:
        """Return where a resume begins, as far as it is known."""
        if self._position:
            epoch, step = self._position
            return f", and a resume begins before epoch {epoch + 1}, step {step + 1}"
        return ", and a resume begins anew" if self._is_told else ""
