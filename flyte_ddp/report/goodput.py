"""Where the seconds of a training have gone, by cause, over all attempts at it: each second has exactly one.

Goodput is the share that brought the training forward, as Google's ml-goodput-measurement has it. What a task cannot
know is how long its first attempt was queued.
"""

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flyte_ddp import events

WORK = ("steps", "data", "stragglers", "evaluating")  # lost, if no checkpoint has what came of it
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
MOST_MARKS = 8  # of checkpoints, which may still be on their way to the storage when a pod is lost


@dataclass
class Attempt:
    """One attempt at a training.

    Attributes:
        began, ended: in seconds since 1970; ended is when it was last heard of.
        seconds: by cause. Of checkpoints, those that training waited for; between, since the attempt before was heard
            of; finishing, after the last evaluation.
        marks: epoch and step of each start and of the newest checkpoints, with the seconds of WORK until then.
    """

    began: float
    ended: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    marks: list[tuple[int, int, float]] = field(default_factory=list)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Attempt":
        """As asdict gives it, perhaps of another version."""
        seconds = {cause: float(written["seconds"].get(cause, 0.0)) for cause in LABELS}
        marks = [(int(epoch), int(step), float(work)) for epoch, step, work in written["marks"]]
        return cls(float(written["began"]), float(written["ended"]), seconds, marks)

    @property
    def work(self) -> float:
        return sum(self.seconds[cause] for cause in WORK)

    def move(self, source: str, target: str, seconds: float) -> None:
        """At most those that are there."""
        moved = max(0.0, min(seconds, self.seconds[source]))
        self.seconds[source] -= moved
        self.seconds[target] += moved

    def mark(self, epoch: int, step: int, written_since: float = 0.0) -> None:
        """written_since: seconds of work that the checkpoint of this position does not have."""
        done = self.work - min(written_since, self.seconds["steps"])
        self.marks = [*self.marks[:1], *self.marks[1:][1 - MOST_MARKS :], (epoch, step, done)]

    def lose(self, epoch: int, step: int) -> bool:
        """What was done after this position, as training goes on from there; False if this attempt began after it.

        What is not known of, such as a checkpoint that was made known too late, is taken for lost.
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
    """Follows the events of an attempt, as they come or from a progress file; as a listener, at the time that it is."""

    def __init__(self, began: float, fetched: float = 0.0, earlier: Sequence[Attempt] = ()):
        """began: in seconds since 1970. fetched: seconds of that since then that went into fetching data. earlier: the
        attempts before.
        """
        heard = max(began, *(attempt.ended for attempt in earlier)) if earlier else began  # no second counts twice
        self.attempts = [*copy.deepcopy(list(earlier)), Attempt(began, heard)]
        self._cause = "recovering" if earlier else "starting"
        self._data = self._stragglers = 0.0  # since the ranks began
        self._epochs = 0
        if earlier:
            self._now.seconds["between"] = max(0.0, began - earlier[-1].ended)
        self.wait(began + fetched)
        self._now.move(self._cause, "fetching", fetched)

    @classmethod
    def begun(cls, line: Mapping[str, Any]) -> "Goodput":
        """From a line that beginning has made."""
        return cls(line["began"], line["fetched"], [Attempt.read(one) for one in line["earlier"]])

    def __call__(self, event: Any) -> None:
        self.add(event, time.time())

    @property
    def _now(self) -> Attempt:
        return self.attempts[-1]

    def wait(self, at: float) -> None:
        """Nothing else has happened until then, in seconds since 1970."""
        now = self._now
        now.seconds[self._cause] += max(0.0, at - now.ended)
        now.ended = max(now.ended, at)

    def add(self, event: Any, at: float) -> None:
        """What has happened since the event before belongs to the cause so far, except for what the event says."""
        self.wait(at)
        now = self._now
        if isinstance(event, events.RunStarted):
            position = event.first_epoch, event.first_step
            any(attempt.lose(*position) for attempt in reversed(self.attempts))  # up to the one that it goes on from
            now.mark(*position)
            self._cause = "steps" if event.first_epoch < event.epochs else "finishing"
            self._epochs = event.epochs
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
        """Of all attempts together, by cause; without those that took none."""
        sums = {cause: sum(attempt.seconds[cause] for attempt in self.attempts) for cause in LABELS}
        return {cause: round(seconds, 3) for cause, seconds in sums.items() if seconds > 0}

    def beginning(self) -> dict[str, Any]:
        """The line of a progress file that begun takes."""
        *earlier, now = self.attempts
        fetched = now.seconds["fetching"]
        return {"began": now.began, "fetched": fetched, "earlier": [asdict(attempt) for attempt in earlier]}


def share_of(seconds: Mapping[str, float]) -> float:
    """Goodput: the share of steps and evaluations in all seconds, from 0 to 1."""
    return sum(seconds.get(cause, 0.0) for cause in ("steps", "evaluating")) / (sum(seconds.values()) or 1.0)


def spent(seconds: Mapping[str, float]) -> str:
    """In words, for a terminal; without what rounds to nothing."""
    said = {LABELS[cause].lower(): f"{value:.1f}" for cause, value in seconds.items()}
    each = ", ".join(f"{cause} {value}" for cause, value in said.items() if value != "0.0")
    return f"{each} (goodput {share_of(seconds):.0%})"
