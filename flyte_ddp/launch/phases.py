"""The phases of a rank between two signs of life, and how long each may take. Standard library only."""

from collections.abc import Sequence
from typing import NamedTuple

from flyte_ddp.settings import RunOptions

STARTING, STEPPING, WRITING = "starting", "stepping", "writing"
SAID = {
    STARTING: "still starting (data, network, checkpoint, first step) after",
    STEPPING: "no step within",
    WRITING: "still writing (a checkpoint, or the results) after",
}


class Timeouts(NamedTuple):
    """Limits on the seconds that a rank may go without a sign of life, one for each phase.

    Attributes:
        step: between two steps; the least for the others, too.
        start: until the first step; 0 if that may not take longer.
        write: while checkpoints or results are written; 0 if that may not take longer.
    """

    step: float
    start: float = 0.0
    write: float = 0.0

    @classmethod
    def of(cls, timeouts: "Timeouts | RunOptions | float") -> "Timeouts":
        """Return the limits in these options; or these; or a number of seconds as the limit for all phases."""
        if isinstance(timeouts, RunOptions):
            return cls(timeouts.timeout_seconds, timeouts.start_timeout_seconds, timeouts.write_timeout_seconds)
        return timeouts if isinstance(timeouts, Timeouts) else cls(timeouts)

    def seconds(self, phase: str) -> float:
        """Return the limit for a phase."""
        return max(self.step, {STARTING: self.start, WRITING: self.write}.get(phase, 0.0))

    def are_hung(self, exceeded: Sequence[bool]) -> bool:
        """Return whether the running ranks hang, of which these were silent for longer than their limits."""
        return any(exceeded)

    def exceeded(self, phase: str) -> str:
        """Return the message for a rank that was silent for longer in a phase, with the option that sets the limit."""
        seconds = self.seconds(phase)
        kind = "" if seconds == self.step else {STARTING: "start_", WRITING: "write_"}[phase]
        return f"{SAID[phase]} {kind}timeout_seconds ({seconds:g})"
