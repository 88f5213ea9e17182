"""A training's progress as JSON lines, for other programs. docs/progress.md documents them."""

import dataclasses
import json
import math
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flyte_ddp import events
from flyte_ddp.fields import plain
from flyte_ddp.report.goodput import Attempt, Goodput
from flyte_ddp.report.record import RunFailed, RunFinished
from flyte_ddp.whole_files import write_whole

FORMAT = 2
FILE = "progress.jsonl"
EVENTS: dict[str, type[Any]] = {
    "start_up": events.StartUp,
    "started": events.RunStarted,
    "step": events.StepLogged,
    "epoch": events.EpochFinished,
    "chosen": events.EpochChosen,
    "checkpoint": events.CheckpointWritten,
    "warning": events.NotLearning,
    "slow_rank": events.SlowRank,
    "ranks": events.RanksTimed,
    "checkpoint_failed": events.CheckpointFailed,
    "started_afresh": events.CheckpointRefused,
    "ranks_restarted": events.RanksRestarted,
    "printed": events.Printed,
}
NAMES = {kind: name for name, kind in EVENTS.items()}
# Fields that are too long for a line, or specific to this machine, with the values that readers get instead
LEFT_OUT: dict[str, Any] = {"layers": [], "gradient_norms": {}, "path": ""}
# So many steps are all written. After them, a step is written for each further thousandth of the elapsed time.
WRITTEN_STEPS = 1000


class ProgressFile(events.Observer):
    """An observer that appends a line for each event.

    On a cluster the file goes to Flyte's storage with the other logs.
    """

    def __init__(self, logs: Path, name: str, attempt: int = 0, goodput: Goodput | None = None):
        """Begin the file, in place of an earlier attempt's.

        Args:
            logs: the folder of the file.
            name: the name of the run.
            attempt: the number of earlier attempts.
            goodput: the seconds by cause; it must get each event before this observer.
        """
        self._path = logs / FILE
        self._run = {"run": name, "attempt": attempt}
        self._goodput = goodput
        # Replacing an earlier attempt's file at once keeps it if this call is refused, or the process killed right now
        with suppress(OSError):  # on a full disk, later lines may be written or lost one by one
            first_line = self._line("attempt", goodput.beginning()) if goodput else b""
            try:
                write_whole(self._path, first_line)
            except OSError:
                self._path.unlink(missing_ok=True)  # this attempt's lines must not follow the earlier attempt's
        self._started: events.RunStarted | None = None
        self._since = time.monotonic()
        self._steps = 0
        # By the names of a step's measures: a script may tell of one in one step, and of another in the next
        self._last: dict[tuple[str, ...], float] = {}
        self._left_out: dict[tuple[str, ...], events.StepLogged] = {}

    def on_run_started(self, event: events.RunStarted) -> None:
        if self._goodput:  # it now knows what earlier attempts have lost
            self._write("attempt", self._goodput.beginning())
        self._started = event
        self._since = time.monotonic()
        self._write("started", {"format": FORMAT, **self._run, **select_fields(event)})

    def on_step_logged(self, event: events.StepLogged) -> None:
        assert self._started is not None  # RunStarted is always the earlier event
        run = self._started
        kind = tuple(event.measures)
        now = time.monotonic()
        elapsed = now - self._since
        if (
            self._steps >= WRITTEN_STEPS
            and now - self._last.get(kind, 0.0) < elapsed / WRITTEN_STEPS
            and event.step < (run.steps_per_epoch or math.inf)
        ):
            self._left_out[kind] = event
            return
        self._left_out.pop(kind, None)
        if event.step == run.steps_per_epoch:
            self._left_out.clear()
        self._steps = self._steps + 1
        self._last[kind] = now
        self._write_event(event)

    def on_run_finished(self, event: RunFinished) -> None:
        for step in sorted(self._left_out.values(), key=lambda step: step.step):
            self._write_event(step)  # only a script has steps after which no epoch ends
        result = event.results[0]
        figures = {"total_seconds": event.total_seconds, "seconds": event.seconds}
        self._write("finished", {**figures, "test": result.tested, "digest": result.digest})

    def on_run_failed(self, event: RunFailed) -> None:
        self._write("failed", {"reason": event.reason})

    def _write_event(self, event: Any) -> None:
        self._write(NAMES[type(event)], select_fields(event))

    on_epoch_finished = on_epoch_chosen = on_not_learning = on_slow_rank = on_ranks_timed = on_printed = _write_event
    on_start_up = on_checkpoint_written = on_checkpoint_failed = on_checkpoint_refused = _write_event
    on_ranks_restarted = _write_event

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        rest = self._line(name, fields)
        with open(self._path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:  # on a full disk; half a line would spoil the one that follows once there is room
                file.truncate(end)
                raise

    def _line(self, name: str, fields: dict[str, Any]) -> bytes:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps(plain({"event": name, "time": now, **fields}), allow_nan=False, ensure_ascii=False)
        return f"{line}\n".encode(errors="backslashreplace")


def select_fields(event: Any) -> dict[str, Any]:
    """Return an event's fields by name, without those of LEFT_OUT."""
    return {name: value for name, value in dataclasses.asdict(event).items() if name not in LEFT_OUT}


def parse_event(line: dict[str, Any]) -> Any:
    """Rebuild an event from a line of progress.jsonl.

    A measure that is null becomes NaN. A field that is not in the line has its value in LEFT_OUT, or its default.

    Args:
        line: the parsed line. Its "event" is the event's name.

    Returns:
        The event; None for "attempt", "finished", "failed", and events of newer versions.

    Raises:
        KeyError, TypeError, AttributeError: The line is not one that ProgressFile writes.
    """
    kind = EVENTS.get(line["event"])
    if kind is None:
        return None
    known = {**LEFT_OUT, **line}  # fields that an older version did not write take their defaults
    values = {field.name: known[field.name] for field in dataclasses.fields(kind) if field.name in known}
    for name in ("measures", "train", "test", "validation"):
        if name in values:
            values[name] = {measure: math.nan if one is None else one for measure, one in line[name].items()}
    return kind(**values)


class TimesRead:
    """The seconds by cause that the lines of a progress file add up to.

    Attributes:
        goodput: None before a line that says when the seconds began.
    """

    def __init__(self) -> None:
        self.goodput: Goodput | None = None

    def read(self, line: dict[str, Any]) -> None:
        """Take in the next line of a progress file.

        The first "attempt" line creates `goodput`. A later "attempt" line corrects the seconds of the earlier attempts.
        Any other line adds the seconds until its event to `goodput`; before an "attempt" line it is ignored.

        Args:
            line: the parsed line. A line that ProgressFile does not write may raise any exception.
        """
        if line["event"] == "attempt":
            begun = Goodput.begun(line)
            if self.goodput:  # the line comes again once it is known what earlier attempts have lost
                self.goodput.attempts[:-1] = begun.attempts[:-1]
            self.goodput = self.goodput or begun
        elif self.goodput:
            self.goodput.add(parse_event(line), datetime.fromisoformat(line["time"]).timestamp())


def attempts_in(path: Path) -> list[Attempt]:
    """Return the attempts in a progress file, oldest first, as far as the file can be read; [] if it cannot."""
    times = TimesRead()
    with suppress(Exception):
        for text in path.read_bytes().split(b"\n")[:-1]:  # splitlines() would also split at U+2028 within a line
            times.read(json.loads(text))
    return times.goodput.attempts if times.goodput else []
