"""The report: one HTML file that shows a run.

The file is rewritten while the run starts and trains, at each warning and at the end.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from flyte_ddp.events import EpochFinished, Observer, RunStarted, StartUp, StepLogged, Warned
from flyte_ddp.report import contents, page
from flyte_ddp.report.article import Drawing, document, render_body
from flyte_ddp.report.figures import Curves, draw
from flyte_ddp.report.predictions import describe_predictions, drawn_figures, drawn_pictures, sample_pictures
from flyte_ddp.report.record import Record, step_figures
from flyte_ddp.report.words import capitalised, in_words
from flyte_ddp.text import counted
from flyte_ddp.whole_files import write_whole

PAGE_SECONDS = 30.0  # between pages that show nothing but steps
PAGES_FRACTION = 0.05  # the largest fraction of the time to spend on pages that the next one replaces
MOST_CURVES = 6  # of measures besides the loss
MOST_LAYERS = 12  # curves in a figure
# The numbers of steps that speed_figures draws, and memory, which only grows
ELSEWHERE = ("samples_per_second", "tokens_per_second", "mfu", "gradient_norm", "peak_memory_gib")


class Report(Observer):
    """An observer that keeps a page at path up to date with the record; publish gets the content of its <body>."""

    def __init__(self, record: Record, path: Path, publish: Callable[[str], None]):
        self._record = record
        self._path = path
        self._publish = publish
        self._last_page = self._next_page = 0.0

    def on_start_up(self, event: StartUp) -> None:
        self._write_if_due()

    def on_run_started(self, event: RunStarted) -> None:
        self._write(live=True)

    def on_step_logged(self, event: StepLogged) -> None:
        if time.monotonic() >= self._last_page + PAGE_SECONDS:
            self._write_if_due()

    def on_epoch_finished(self, event: EpochFinished) -> None:
        if event.position < self._record.info.settings.last_epoch:  # after the last epoch the final page follows
            self._write_if_due()

    def on_not_learning(self, event: Warned) -> None:
        self._write(live=True)

    on_slow_rank = on_not_learning

    def close(self) -> None:
        self._write(live=False)

    def _write_if_due(self) -> None:
        if time.monotonic() >= self._next_page:
            self._write(live=True)

    def _write(self, live: bool) -> None:
        started = time.monotonic()
        try:
            record = self._record.so_far()  # the parent's main thread keeps the record
            body = fragment(record)
            write_whole(self._path, document(record.title, body, live).encode())
            self._publish(body)
        finally:  # where a page can't be written or shown, the next one is not for each step, either
            self._last_page = now = time.monotonic()
            self._next_page = now + (now - started) * (1 / PAGES_FRACTION - 1)


def fragment(record: Record) -> str:
    """Render a run's record, pictures and figures as the content of <body>, for a Deck or document().

    Pictures and figures are read from the folder record.info.logs. All values are escaped, except the figures that the
    training has drawn itself.
    """
    return render_body(
        page.REPORT,
        record=record,
        tiles=contents.tiles(record),
        curves=_drawings(progress_curves(record), record),
        epochs=contents.epoch_table(record),
        kept=contents.kept_table(record),
        **describe_predictions(record),
        pictures=drawn_pictures(record.info.logs),
        figures=drawn_figures(record.info.logs),
        data=contents.data_lines(record),
        samples=sample_pictures(record.info),
        causes=contents.cause_bars(record),
        attempts=contents.attempts_table(record),
        speed=_drawings(speed_figures(record), record),
        ranks=contents.ranks(record),
        operators=contents.operator_table(record),
        setup=contents.setup_tables(record),
    )


def _drawings(several: Sequence[Curves], record: Record) -> list[Drawing]:
    shown = [one for one in several if any(one.series.values())]
    if record.started and not record.started.epochs:
        shown = [dataclasses.replace(one, x="steps") for one in shown]
    return [Drawing(one.title, draw(one)) for one in shown]


def progress_curves(record: Record) -> list[Curves]:
    """Return figures of the loss, of at most MOST_CURVES other measures, and of each other number of the steps.

    The numbers in ELSEWHERE (speed, gradient norm and memory) are left out. The loss has a logarithmic axis if all its
    finite values are positive, and the largest is more than 30, but less than 1e9, times the smallest.
    """
    loss = _measure_curves(record, "loss")
    points = chain.from_iterable(loss.series.values())
    losses = [value for _, value in points if math.isfinite(value)]
    least = min(losses, default=1.0)
    most = max(losses, default=1.0)
    others = [name for name in record.measures if name != "loss"][:MOST_CURVES]
    figures = [(record.position(step), step_figures(step)) for step in record.steps]
    known = dict.fromkeys(chain.from_iterable(values for _, values in figures))
    names = [name for name in known if name not in ELSEWHERE]
    return [
        dataclasses.replace(loss, logarithmic=least > 0 and 30 < most / least < 1e9),
        *(_measure_curves(record, name) for name in others),
        *(
            Curves(capitalised(in_words(name)), {"": [(x, values[name]) for x, values in figures if name in values]})
            for name in names
        ),
    ]


def _measure_curves(record: Record, name: str) -> Curves:
    at = record.position
    epochs = record.epochs
    tested = record.tested
    series = {"training": [(at(step), step.measures[name]) for step in record.steps if name in step.measures]}
    remark = ""
    for split in dict.fromkeys(epoch.split for epoch in epochs):
        points = [(e.position, e.evaluated[name]) for e in epochs if e.split == split and name in e.evaluated]
        series[split] = points
        if points:
            last = record.format_measure(name, {name: points[-1][1]})
            remark = f"{capitalised(split)} {in_words(name)} {last} after epoch {counted(points[-1][0])}."
    return Curves(
        capitalised(in_words(name)),
        series,
        remark,
        percent=record.started is not None and name in record.started.percent,
        marks=[at(warning) for warning in record.warnings],
        chosen=tested.position if tested and tested.is_best else None,
    )


def speed_figures(record: Record) -> list[Curves]:
    """Return four figures over the logged steps: samples per second, tokens per second, MFU and gradient norms.

    MFU is the model FLOPs utilization. A figure has no points if its values are unknown. The last figure has the norm
    of all weights together, and of each of the first MOST_LAYERS weights whose names end in "weight"; if there are
    none, of the first MOST_LAYERS weights. Norms of 0 are left out.
    """
    at = record.position
    steps = record.steps
    names = list(steps[-1].gradient_norms) if steps else []
    names = ([name for name in names if name.endswith("weight")] or names)[:MOST_LAYERS]
    norms = {}
    for name in names:
        each = [(at(step), step.gradient_norms.get(name, 0.0)) for step in steps]
        norms[name] = [(x, norm) for x, norm in each if norm > 0]
    norms["all"] = [(at(step), step.gradient_norm) for step in steps if (step.gradient_norm or 0.0) > 0]
    speeds = {
        f"{capitalised(record.samples)} per second, all ranks": "samples_per_second",
        "Tokens per second, all ranks": "tokens_per_second",
        "MFU": "mfu",
    }
    return [
        *(
            Curves(
                title,
                {"": [(at(step), value) for step in steps if (value := getattr(step, name)) is not None]},
                from_zero=True,
            )
            for title, name in speeds.items()
        ),
        Curves("Gradient norm by layer", norms, logarithmic=True),
    ]
