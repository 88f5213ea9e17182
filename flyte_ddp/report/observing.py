"""The observers of a run: console, tracker, report and progress file."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flyte_ddp.code.user_code import UserCode
from flyte_ddp.events import Observer
from flyte_ddp.report.background import Background, one_line
from flyte_ddp.report.console import open_console, warn
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.own_observers import OwnObservers
from flyte_ddp.report.progress import ProgressFile
from flyte_ddp.report.record import Record, RunFailed, RunFinished, RunInfo
from flyte_ddp.report.report import Report
from flyte_ddp.report.tracking import open_tracker

REPORT_SECONDS = 60.0  # how long the end of a run waits for its final page


class Observers:
    """Passes events to all observers of a run. One that raises is dropped: observing must not stop training.

    As a context: they see an exception that ends the block as a failure; the block itself calls end() when it succeeds.
    """

    def __init__(
        self,
        info: RunInfo,
        report_path: Path,
        publish: Callable[[str], None],
        *others: Observer,
        goodput: Goodput,
        own: Sequence[UserCode] = (),
        is_local: bool = True,
    ):
        """publish: shows the page, as HTML, where people see it live. own: the user's. is_local: whether the file at
        report_path can be opened meanwhile."""
        self.record, self._report_path, self._publish = Record(info, goodput), report_path, publish
        self._tracker = open_tracker(info, report_path.parent, self._on_url)
        self._console = open_console(report_path.as_uri() if is_local else "")
        self._own = OwnObservers(own)
        self._report = Background("the report", self._open_report, REPORT_SECONDS)
        self._progress = ProgressFile(info.logs, info.name, info.attempt, goodput)
        self._last: RunFinished | RunFailed | None = None
        self._listening: list[Observer] = [
            self.record, self._console, self._report, self._progress, *others, self._own,
        ]  # fmt: skip
        if self._tracker:
            self._listening.append(self._tracker)

    def __enter__(self) -> "Observers":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, stack: Any) -> None:
        if error and self._last:  # Ctrl-C while the end waits for a tracker: what has been trained is no failure
            self._report.close(self._last)
        elif error:
            self.end(RunFailed.by(error))

    def __call__(self, event: Any) -> None:
        for observer in list(self._listening):
            try:
                observer(event)
            except Exception as error:
                self._listening.remove(observer)
                warn(f"{type(observer).__name__} gave up: {type(error).__name__}: {one_line(error)}")

    def end(self, event: "RunFinished | RunFailed") -> None:
        """Passes the last event; all observers have finished, or been abandoned, when this returns."""
        self._last = event
        self._console.close()
        self.record(event)
        if self._progress in self._listening:
            with suppress(OSError):  # a full disk
                self._progress(event)
        closes = (self._close_tracker, self._own.close)
        tracker, own = (threading.Thread(target=close, args=(event,), daemon=True) for close in closes)
        own.start()
        tracking = self.record.info.options.tracking
        if tracking != "mlflow":
            tracker.start()
        if tracking in ("auto", "online") and not self.record.tracking_url:
            tracker.join()  # the run's URL may still come, and belongs in the report
        self._report.close(event)
        if tracking == "mlflow":
            tracker.start()  # it sends the report
        tracker.join()
        own.join()
        if not self._report_path.exists():  # without its output the task would fail
            with suppress(OSError):  # a full disk: what has been trained is there
                self._report_path.write_text("<!doctype html><title>No report</title><p>The report could not be made.")

    def _close_tracker(self, event: Any) -> None:
        if self._tracker:
            self._tracker.close(event)

    def _on_url(self, url: str) -> None:
        self.record.tracking_url = url

    def _open_report(self) -> Report:
        return Report(self.record, self._report_path, self._publish)
