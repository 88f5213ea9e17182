"""The observers of a run: record, terminal, progress file, the user's own, and on request report and tracker."""

import copy
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flyte_ddp.code.user_code import UserCode
from flyte_ddp.events import EpochFinished, Event, Observer, RunStarted, StepLogged, tell
from flyte_ddp.launch.environment import is_first_rank
from flyte_ddp.report.background import Background, one_line
from flyte_ddp.report.console import open_console, warn
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.progress import FILE, ProgressFile
from flyte_ddp.report.record import Record, RunFailed, RunFinished, RunInfo
from flyte_ddp.report.report import Report
from flyte_ddp.report.tracking import open_tracker

REPORT_SECONDS = 60.0  # how long the end of a run waits for its final page
OBSERVER_SECONDS = 10.0  # how long the end of a run waits for a user's own observer
FIRST_SECONDS = 5.0  # there is no estimate of the time left in these, because the first steps are slower
ERRORS = (Exception, SystemExit)


class Observers:
    """All observers of a run, which get each event. A fault of one hurts neither the others nor the training.

    An exception that ends the `with` block counts as a failure, unless end() was called before.

    Attributes:
        record: what is known of the run.
    """

    def __init__(
        self,
        info: RunInfo,
        goodput: Goodput,
        *others: Observer,
        own: Sequence[UserCode] = (),
        page: Path | None = None,
        publish: Callable[[str], None] = lambda html: None,
        is_local: bool = True,
        on_event: Callable[[Event], None] | None = None,
    ):
        """Open the observers. Only the first rank's write files.

        Args:
            info: the run.
            goodput: the seconds of the run by cause.
            others: more observers.
            own: the user's observers.
            page: the path of the report; the model will be beside it. Without a page, there is no tracker either.
            publish: shows the content of the page's <body> where people see it live.
            is_local: whether the page can be opened while it is written.
            on_event: gets each event of the ranks, and may raise. With it and without a page, nothing is printed.

        Raises:
            InputError: the tracker is not installed, or has no address.
        """
        self.record = Record(info, goodput)
        self._page = page
        self._on_event = on_event
        self._tracker = open_tracker(info, page.parent, self._on_url) if page else None
        shown = page.as_uri() if page and is_local else ""
        ours: list[Observer] = [open_console(shown)] if page or not on_event else []
        theirs: list[Observer] = [self._tracker] if self._tracker else []
        if is_first_rank():
            progress = ProgressFile(info.logs, info.name, info.attempt, goodput)
            ours.append(Background(FILE, lambda: progress, OBSERVER_SECONDS))
            theirs += _own_observers(own)
        if page:
            ours.append(Background("the report", partial(Report, self.record, page, publish), REPORT_SECONDS))
        self._ours = ours
        self._theirs = theirs
        self._receivers = [self.record, *ours, *others, *theirs]
        self._time_left = TimeLeft()
        self._last: RunFinished | RunFailed | None = None

    def __enter__(self) -> "Observers":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, stack: Any) -> None:
        if error and self._last:  # Ctrl-C while end() waits does not make the finished training a failure
            self._close(self._ours)
        elif error:
            self.end(RunFailed.by(error))

    def __call__(self, event: Any) -> None:
        event = self._time_left.estimate(event)
        self._forward(event)
        if self._on_event:
            self._on_event(event)

    def end(self, event: RunFinished | RunFailed) -> None:
        """Forward the last event, and close all observers: wait until each has finished or is out of time.

        If the report was not written, a placeholder is written in its place.
        """
        self._last = event
        self._forward(event)
        if self._tracker:
            self._tracker.wait_until_made()  # the tracker may still get the run's URL, which belongs in the report
        self._close(self._ours)
        self._close(self._theirs)  # a tracker may send the report

    def _forward(self, event: Any) -> None:
        """Pass an event to all observers. An observer that raises an error gets no more events; a warning says so."""
        for receiver in list(self._receivers):
            try:
                receiver(event)
            except Exception as error:
                self._receivers.remove(receiver)
                warn(f"{type(receiver).__name__} gave up: {type(error).__name__}: {one_line(error)}")

    def _close(self, observers: Sequence[Observer]) -> None:
        for observer in observers:
            observer.close()
        if self._page and not self._page.exists():  # without this output the task would fail
            with suppress(OSError):  # the disk may be full; the trained model is complete
                self._page.write_text("<!doctype html><title>No report</title><p>The report could not be made.")

    def _on_url(self, url: str) -> None:
        self.record.tracking_url = url


def _own_observers(codes: Sequence[UserCode]) -> list[Background]:
    """Import the classes of the user's observers, and create each observer in a thread of its own.

    If a class cannot be imported, a warning is printed, and the class is left out.

    Args:
        codes: the classes, each with its name "package.module:Name" and the root folder to import from.
    """
    opened = []
    # Not in the threads: in a process that is a rank, an import after the start would count as one of the recipe's
    for code in codes:
        sys.path.insert(0, code.root)  # pyflyte has the root on the path only while it loads the workflow
        try:
            make = partial(OwnObserver, code.name, pkgutil.resolve_name(code.name))
            opened.append(Background(f"observer {code.name}", make, OBSERVER_SECONDS))
        except ERRORS as error:
            _give_up(code.name, error)
        finally:
            with suppress(ValueError):  # the module may have removed it
                sys.path.remove(code.root)
    return opened


class OwnObserver(Observer):
    """A user's observer, which gets events until it raises an exception. The exception is reported once."""

    def __init__(self, name: str, make: Callable[[], object]):
        self._name = name
        self._observer = make()

    def __call__(self, event: Any) -> None:
        try:
            tell(self._observer, copy.deepcopy(event))  # the user's code might change the event, which others read
        except ERRORS as error:
            self._observer = None
            _give_up(self._name, error)


def _give_up(name: str, error: BaseException) -> None:
    warn(f"observer {name} gave up: {type(error).__name__}: {one_line(error)}. Training was not affected.")


class TimeLeft:
    """An estimate of the time that a training still needs, by the pace of this attempt.

    A step takes its share of all time since the first one, checkpoints included, without evaluations. Evaluations are
    counted by their share in the steps that have been evaluated, because the next one may be near or far.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now

    def estimate(self, event: Any) -> Any:
        """Return a run's next event; for a StepLogged, return a copy with the estimate of seconds_left.

        Pass each event of the run, in order, because the estimate follows from all. It is None while unknown.
        """
        if isinstance(event, RunStarted):
            self._began = self._now()
            self._run = event
            self._first = self._evaluated = event.first_epoch * (event.steps_per_epoch or 0) + event.first_step
            self._evaluating = 0.0
        elif isinstance(event, EpochFinished):
            self._evaluated = round(event.position * (self._run.steps_per_epoch or 0))
            self._evaluating += event.evaluate_seconds
        elif isinstance(event, StepLogged):
            return replace(event, seconds_left=self._left(event))
        return event

    def _left(self, event: StepLogged) -> float | None:
        """Return the seconds from this step to the end of training, evaluations included; None if unknown.

        They are unknown in the first FIRST_SECONDS, for a script, and if run.steps_per_epoch is unknown.
        """
        run = self._run
        seconds = self._now() - self._began
        if seconds < FIRST_SECONDS or not run.epochs or not run.steps_per_epoch:
            return None
        done = event.epoch * run.steps_per_epoch + event.step
        # In a user's own loop, a later epoch may be longer than the first one
        steps = max(done, run.epochs * run.steps_per_epoch)
        stepping = (seconds - self._evaluating) / max(1, done - self._first) * (steps - done)
        evaluating = self._evaluating / max(1, self._evaluated - self._first) * (steps - self._evaluated)
        return round(stepping + evaluating, 1)
