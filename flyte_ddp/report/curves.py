"""The report's curves: measures, learning rate, throughput and gradient norms over epochs."""

import dataclasses
import math

from flyte_ddp.report.figures import Curves
from flyte_ddp.report.record import Record
from flyte_ddp.report.words import capitalised, in_words
from flyte_ddp.text import counted

MOST_CURVES = 6  # of measures besides the loss
MOST_LAYERS = 12  # curves in a figure


def progress_curves(record: Record) -> list[Curves]:
    """Loss, the other measures and learning rate over epochs."""
    loss = _measure_curves(record, "loss")
    losses = [value for points in loss.series.values() for _, value in points if math.isfinite(value)]
    least, most = min(losses, default=1.0), max(losses, default=1.0)
    others = [name for name in record.measures if name != "loss"][:MOST_CURVES]
    rates = [(record.position(step), step.learning_rate) for step in record.steps]
    return [
        dataclasses.replace(loss, logarithmic=least > 0 and 30 < most / least < 1e9),
        *(_measure_curves(record, name) for name in others),
        Curves("Learning rate", {"": rates}),
    ]


def _measure_curves(record: Record, name: str) -> Curves:
    at, epochs, tested = record.position, record.epochs, record.tested
    series = {"training": [(at(step), step.measures[name]) for step in record.steps if name in step.measures]}
    remark = ""
    for split in dict.fromkeys(epoch.split for epoch in epochs):
        points = [(e.position, e.evaluated[name]) for e in epochs if e.split == split and name in e.evaluated]
        series[split] = points
        if points:
            last = record.written(name, {name: points[-1][1]})
            remark = f"{capitalised(split)} {in_words(name)} {last} after epoch {counted(points[-1][0])}."
    return Curves(
        capitalised(in_words(name)),
        series,
        remark,
        percent=record.started is not None and name in record.started.percent,
        marks=[at(warning) for warning in record.warnings],
        chosen=tested.position if tested and tested.is_best else None,
    )


def speed_curves(record: Record) -> list[Curves]:
    """Throughput over epochs, and the norm of each weight's gradient."""
    at, steps = record.position, record.steps
    names = list(steps[-1].gradient_norms) if steps else []
    names = ([name for name in names if name.endswith("weight")] or names)[:MOST_LAYERS]
    norms = {
        name: [(at(step), norm) for step in steps if (norm := step.gradient_norms.get(name, 0)) > 0] for name in names
    }
    return [
        Curves(
            f"{capitalised(record.samples)} per second, all ranks",
            {"": [(at(step), step.samples_per_second) for step in steps]},
            from_zero=True,
        ),
        Curves("Gradient norm by layer", norms, logarithmic=True),
    ]
