"""The report: one HTML file that shows a run, rewritten after each epoch, at each warning and at the end."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyte_ddp.events import EpochFinished, NotLearning, Observer, RunStarted
from flyte_ddp.report import contents, curves, page
from flyte_ddp.report.figures import Curves, draw, load_matplotlib
from flyte_ddp.report.predictions import predictions_of
from flyte_ddp.report.record import Record, RunFailed, RunFinished
from flyte_ddp.report.verdict import drawn_figures, drawn_pictures, sample_pictures, verdict
from flyte_ddp.text import encodable

SHARE = 0.05  # the largest share of the time to spend on pages that the next one replaces


class Report(Observer):
    """Keeps the page at path up to date with the record, and passes the content of its <body> to publish."""

    def __init__(self, record: Record, path: Path, publish: Callable[[str], None]):
        self._record, self._path, self._publish = record, path, publish
        self._next_page = 0.0
        load_matplotlib()  # now, while the ranks train, rather than after an epoch

    def on_run_started(self, event: RunStarted) -> None:
        self._write_if_due()

    def on_epoch_finished(self, event: EpochFinished) -> None:
        if event.epoch + 1 < self._record.info.settings.last_epoch:  # else the final page follows at once
            self._write_if_due()

    def on_not_learning(self, event: NotLearning) -> None:
        self._write(live=True)

    def on_run_finished(self, event: "RunFinished | RunFailed") -> None:
        self._write(live=False)

    on_run_failed = on_run_finished

    def _write_if_due(self) -> None:
        if time.monotonic() >= self._next_page:
            self._write(live=True)

    def _write(self, live: bool) -> None:
        started, record = time.monotonic(), self._record.so_far()  # which the parent's main thread keeps
        body = fragment(record)
        beside = self._path.with_name(f".{self._path.name}")
        beside.write_text(document(record, body, live), encoding="utf-8")
        os.replace(beside, self._path)
        self._publish(body)
        now = time.monotonic()
        self._next_page = now + (now - started) * (1 / SHARE - 1)


def document(record: Record, body: str, live: bool) -> str:
    """The whole page, which loads nothing from the network; a live one reloads itself every few seconds."""
    from markupsafe import Markup

    title = f"{record.status}: training {record.subject}"
    return render(page.PAGE, title=title, fragment=Markup(body), live=live)


def fragment(record: Record) -> str:
    """The content of <body>, for a Deck; all values are escaped."""
    info = record.info
    parts = {
        "confusion": None,
        "classes": [],
        "mistakes": [],
        "operators": None,
        "samples": [],
        "subject": record.subject,
        "status": record.status,
        "failure": record.failure,
        "warnings": [warning.reason for warning in record.warnings],
        "stand_in": info.description.name if info.description and info.is_stand_in else "",
        "subtitle": f"{getattr(info.settings, 'model', info.recipe_name)}, run {info.name}",
        "url": record.tracking_url,
        "notes": record.notes,
        "tiles": contents.tiles(record),
        "curves": _figures(curves.progress_curves(record)),
        "epoch_heads": contents.epoch_heads(record),
        "epochs": contents.epoch_lines(record),
        "phases": contents.phase_bars(record),
        "speed": _figures(curves.speed_curves(record)),
        "pictures": drawn_pictures(info.logs),
        "figures": drawn_figures(info.logs),
        "data": {"title": "Dataset", "lines": contents.data_lines(record)},
        "setup": contents.setup_tables(record),
        **contents.operator_table(record),
    }
    if info.data and info.description:
        parts["samples"] = sample_pictures(info.data, info.description.classes)
    predictions = predictions_of(info, record.finished) if record.finished else None
    if predictions:
        parts.update(verdict(predictions))
    return render(f"<style>{page.STYLE}</style>{page.MACROS}{page.BODY}", **parts)


def _figures(several: "list[Curves]") -> Any:
    from markupsafe import Markup

    return [{"title": one.title, "svg": Markup(draw(one))} for one in several if any(one.series.values())]


def render(template: str, **values: Any) -> str:
    """Fills in a template; whatever is not Markup is escaped, also what no file could hold."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return encodable(environment.from_string(template).render(values))
