"""The seconds of a training by cause, over all attempts at it. Each second has exactly one cause.

Goodput is the share of seconds that brought the training forward, as Google's ml-goodput-measurement defines it. A task
cannot know how long its first attempt was queued.
"""

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flyte_ddp import events

WORK = ("steps", "data", "stragglers", "evaluating")  # these seconds are lost if no checkpoint has their result
LABELS = {
    "steps": "Steps",
    "evaluating": "Evaluating",
    "data": "Waiting for data",
    "stragglers": "Waiting for a slow rank",
    "checkpoints": "Checkpoints",
    "fetching": "Fetching data",
    "starting": "Starting",
    "recovering": "Recovering",
    "lost": "Lost and done again",
    "between": "Between attempts",
    "finishing": "Finishing",
}
MOST_MARKS = 8  # the newest checkpoints, whose upload may not have ended when a pod is lost


@dataclass
class Attempt:
    """An attempt at a training.

    Attributes:
        began: in seconds since 1970.
        ended: when the attempt was last heard of, in seconds since 1970.
        seconds: by cause. "checkpoints" are those that training waited for; "between" those since the attempt before
            was last heard of; "finishing" those after the last evaluation.
        marks: epoch and step of each start and of the newest checkpoints, with the seconds of WORK until then.
    """

    began: float
    ended: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    marks: list[tuple[int, int, float]] = field(default_factory=list)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Attempt":
        """Build an attempt from what asdict returned, perhaps in another version of this library."""
        seconds = {cause: float(written["seconds"].get(cause, 0.0)) for cause in LABELS}
        marks = [(int(epoch), int(step), float(work)) for epoch, step, work in written["marks"]]
        return cls(float(written["began"]), float(written["ended"]), seconds, marks)

    @property
    def work(self) -> float:
        return sum(self.seconds[cause] for cause in WORK)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move seconds from one cause to another, at most those that the source has. Negative seconds count as 0."""
        moved = max(0.0, min(seconds, self.seconds[source]))
        self.seconds[source] -= moved
        self.seconds[target] += moved

    def mark(self, epoch: int, step: int, write_seconds: float = 0.0) -> None:
        """Append a mark: a position from which training can continue, with the seconds of work done until then.

        `marks` keeps the first mark and the newest MOST_MARKS. Seconds of work are those of the causes in WORK.

        Args:
            epoch: the position's epoch.
            step: the position's step.
            write_seconds: how long ago the position was reached: the seconds for writing its checkpoint. They are
                subtracted from the work, at most as many as "steps" has.
        """
        done = self.work - min(write_seconds, self.seconds["steps"])
        self.marks.append((epoch, step, done))
        del self.marks[1:-MOST_MARKS]

    def lose(self, epoch: int, step: int) -> bool:
        """Move this attempt's seconds of work after a position to the cause "lost": the training continues from there.

        These are the seconds after the last mark() at or before the position or, if all marks are later, after the
        first. All marks after the position are deleted, except the first.

        Args:
            epoch: the position's epoch.
            step: the position's step.

        Returns:
            True if this attempt began at or before the position. False if it began later or never started: then work of
            earlier attempts is lost, too.
        """
        if not self.marks:
            return False
        first, *rest = self.marks
        self.marks = [first, *(mark for mark in rest if mark[:2] <= (epoch, step))]
        lost = self.work - self.marks[-1][2]
        for cause in WORK:
            before = self.seconds["lost"]
            self.move(cause, "lost", lost)
            lost -= self.seconds["lost"] - before
        return first[:2] <= (epoch, step)


class Goodput:
    """A listener that adds up seconds by cause, from the events of an attempt or from a progress file."""

    def __init__(self, began: float, fetched: float = 0.0, earlier: Sequence[Attempt] = ()):
        """Begin an attempt.

        Args:
            began: in seconds since 1970.
            fetched: how many seconds since then went into fetching data.
            earlier: the attempts before this one.
        """
        # The later of both, so that no second counts twice
        heard = max(began, *(attempt.ended for attempt in earlier)) if earlier else began
        self.attempts = [*copy.deepcopy(list(earlier)), Attempt(began, heard)]
        self._cause = "recovering" if earlier else "starting"
        self._data = self._stragglers = 0.0  # seconds since the ranks began
        self._epochs = math.inf
        if earlier:
            self._now.seconds["between"] = max(0.0, began - earlier[-1].ended)
        self.wait(began + fetched)
        self._now.move(self._cause, "fetching", fetched)

    @classmethod
    def begun(cls, line: Mapping[str, Any]) -> "Goodput":
        """Rebuild a Goodput from the line that beginning() returns."""
        return cls(line["began"], line["fetched"], [Attempt.read(one) for one in line["earlier"]])

    def __call__(self, event: Any) -> None:
        self.add(event, time.time())

    @property
    def _now(self) -> Attempt:
        return self.attempts[-1]

    def wait(self, at: float) -> None:
        """Count the seconds until `at`, in seconds since 1970, for the current cause."""
        now = self._now
        now.seconds[self._cause] += max(0.0, at - now.ended)
        now.ended = max(now.ended, at)

    def add(self, event: Any, at: float) -> None:
        """Count the seconds since the previous event for the current cause, then take in the event.

        If the event reports seconds of another cause, such as an evaluation's, they move to that cause. A start, an
        evaluation, the choice of an epoch and a restart of ranks change the current cause. A start also counts work
        after its position as lost, in earlier attempts, too.

        Args:
            event: the event. Events of other kinds only count seconds.
            at: the event's time, in seconds since 1970.
        """
        self.wait(at)
        now = self._now
        if isinstance(event, events.RunStarted):
            position = event.first_epoch, event.first_step
            for attempt in reversed(self.attempts):
                if attempt.lose(*position):  # training continues from this attempt
                    break
            now.mark(*position)
            self._cause = "steps" if event.first_epoch < (event.epochs or math.inf) else "finishing"
            self._epochs = event.epochs or math.inf
            self._data = 0.0
            self._stragglers = 0.0
        elif isinstance(event, events.EpochFinished):
            now.move("steps", "evaluating", event.evaluate_seconds)
            self._cause = "finishing" if event.position >= self._epochs else "steps"
        elif isinstance(event, events.EpochChosen):
            now.move(self._cause, "evaluating", event.seconds)
            self._cause = "finishing"
        elif isinstance(event, events.CheckpointWritten):
            now.move(self._cause, "checkpoints", event.stall_seconds)
            now.mark(event.epoch, event.step, event.write_seconds)
        elif isinstance(event, events.RanksTimed):
            data = statistics.median(event.data)
            stragglers = max(event.waited_for)
            now.move("steps", "data", data - self._data)
            now.move("steps", "stragglers", stragglers - self._stragglers)
            self._data = data
            self._stragglers = stragglers
        elif isinstance(event, events.RanksRestarted):
            self._cause = "recovering"

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of all attempts together, by cause, without causes that took none."""
        sums = {cause: sum(attempt.seconds[cause] for attempt in self.attempts) for cause in LABELS}
        return {cause: round(seconds, 3) for cause, seconds in sums.items() if seconds > 0}

    def beginning(self) -> dict[str, Any]:
        """Return the line of a progress file from which begun() rebuilds this object."""
        *earlier, now = self.attempts
        fetched = now.seconds["fetching"]
        return {"began": now.began, "fetched": fetched, "earlier": [asdict(attempt) for attempt in earlier]}


def compute_goodput(seconds: Mapping[str, float]) -> float:
    """Return the goodput: the share of steps and evaluations in all seconds, from 0 to 1."""
    return sum(seconds.get(cause, 0.0) for cause in ("steps", "evaluating")) / (sum(seconds.values()) or 1.0)


def format_seconds(seconds: Mapping[str, float]) -> str:
    """Format seconds by cause and the goodput on one line, without causes that round to 0.0."""
    said = {LABELS[cause].lower(): f"{value:.1f}" for cause, value in seconds.items()}
    each = ", ".join(f"{cause} {value}" for cause, value in said.items() if value != "0.0")
    return f"{each} (goodput {compute_goodput(seconds):.0%})"
