"""The report: one HTML file that shows a run, rewritten while it starts and trains, at each warning and at the end."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flyte_ddp.events import EpochFinished, Observer, RunStarted, StartUp, StepLogged, Warned
from flyte_ddp.report import contents, curves, page
from flyte_ddp.report.article import Drawing, document, render_body
from flyte_ddp.report.figures import Curves, draw
from flyte_ddp.report.record import Record, RunFailed, RunFinished
from flyte_ddp.report.verdict import drawn_figures, drawn_pictures, sample_pictures, verdict
from flyte_ddp.whole_files import write_whole

PAGE_SECONDS = 30.0  # between pages that show nothing but steps
PAGES_FRACTION = 0.05  # the largest fraction of the time to spend on pages that the next one replaces


class Report(Observer):
    """Keeps the page at path up to date with the record, and passes the content of its <body> to publish."""

    def __init__(self, record: Record, path: Path, publish: Callable[[str], None]):
        self._record, self._path, self._publish = record, path, publish
        self._last_page = self._next_page = 0.0

    def on_start_up(self, event: StartUp) -> None:
        self._write_if_due()

    def on_run_started(self, event: RunStarted) -> None:
        self._write(live=True)

    def on_step_logged(self, event: StepLogged) -> None:
        if time.monotonic() >= self._last_page + PAGE_SECONDS:
            self._write_if_due()

    def on_epoch_finished(self, event: EpochFinished) -> None:
        if event.position < self._record.info.settings.last_epoch:  # else the final page follows at once
            self._write_if_due()

    def on_not_learning(self, event: Warned) -> None:
        self._write(live=True)

    on_slow_rank = on_not_learning

    def on_run_finished(self, event: "RunFinished | RunFailed") -> None:
        self._write(live=False)

    on_run_failed = on_run_finished

    def _write_if_due(self) -> None:
        if time.monotonic() >= self._next_page:
            self._write(live=True)

    def _write(self, live: bool) -> None:
        started, record = time.monotonic(), self._record.so_far()  # which the parent's main thread keeps
        body = fragment(record)
        write_whole(self._path, document(record.title, body, live).encode())
        self._publish(body)
        self._last_page = now = time.monotonic()
        self._next_page = now + (now - started) * (1 / PAGES_FRACTION - 1)


def fragment(record: Record) -> str:
    """The content of <body>, for a Deck; all values are escaped."""
    return render_body(
        page.REPORT,
        record=record,
        tiles=contents.tiles(record),
        curves=_drawings(curves.progress_curves(record)),
        epoch_heads=contents.epoch_heads(record),
        epochs=contents.epoch_lines(record),
        kept=contents.kept_table(record),
        **verdict(record),
        pictures=drawn_pictures(record.info.logs),
        figures=drawn_figures(record.info.logs),
        data=contents.data_lines(record),
        samples=sample_pictures(record.info),
        causes=contents.cause_bars(record),
        attempts=contents.attempts_table(record),
        speed=_drawings(curves.speed_curves(record)),
        ranks=contents.ranks(record),
        operators=contents.operator_table(record),
        setup=contents.setup_tables(record),
    )


def _drawings(several: Sequence[Curves]) -> list[Drawing]:
    return [Drawing(one.title, draw(one)) for one in several if any(one.series.values())]
