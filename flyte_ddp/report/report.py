"""The report: one HTML file that shows a run, rewritten after each epoch, at each warning and at the end."""

import os
import time
from pathlib import Path
from typing import Any, Callable

from flyte_ddp.events import EpochFinished, NotLearning, RunStarted
from flyte_ddp.report import contents, curves, page
from flyte_ddp.report.figures import Curves, draw, load_matplotlib
from flyte_ddp.report.predictions import predictions_of
from flyte_ddp.report.record import Record, RunFailed, RunFinished, RunInfo
from flyte_ddp.report.verdict import drawn_pictures, sample_pictures, verdict
from flyte_ddp.text import encodable

SHARE = 0.05  # the largest share of the time to spend on pages that the next one replaces


class Report:
    """Keeps the page at path up to date, and passes the content of its <body> to publish."""

    def __init__(self, info: RunInfo, path: Path, publish: Callable[[str], None], tracking_url: Callable[[], str]):
        self._record, self._path, self._publish = Record(info), path, publish
        self._tracking_url = tracking_url
        self._next_page = 0.0
        load_matplotlib()  # now, while the ranks train, rather than after an epoch

    def __call__(self, event: Any) -> None:
        self._record(event)
        is_last = isinstance(event, (RunFinished, RunFailed))
        is_due = isinstance(event, (RunStarted, EpochFinished)) and time.monotonic() >= self._next_page
        ends_training = isinstance(event, EpochFinished) and event.epoch + 1 == self._record.info.settings.last_epoch
        is_urgent = is_last or isinstance(event, NotLearning)
        if is_urgent or (is_due and not ends_training):  # after the last epoch the final page follows at once
            self._write(is_last)

    def close(self) -> None:
        pass

    def _write(self, is_last: bool) -> None:
        started = time.monotonic()
        self._record.tracking_url = self._tracking_url()
        body = fragment(self._record)
        beside = self._path.with_name(f".{self._path.name}")
        beside.write_text(document(self._record, body, live=not is_last), encoding="utf-8")
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
