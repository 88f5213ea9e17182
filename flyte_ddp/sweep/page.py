"""The trials of a sweep side by side: a table as CSV, and a page."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.figures import scatter
from flyte_ddp.sweep.search import TrialResult


class Trial(NamedTuple):
    """A trial's number in the sweep, from 1, and its result."""

    number: int
    result: TrialResult


def ranked(results: Sequence[TrialResult]) -> list[Trial]:
    """The trials that trained longest first, then by accuracy, then by number; failed ones last."""

    def order(trial: Trial) -> tuple[bool, float, float]:
        result = trial.result
        return bool(result.failure), -(result.hp.stop_after or math.inf), -result.accuracy

    return sorted((Trial(number, result) for number, result in enumerate(results, 1)), key=order)


def are_cut(trials: Sequence[Trial]) -> bool:
    return any(trial.result.hp.stop_after for trial in trials)


def chosen(hp: Hyperparameters, names: Iterable[str]) -> str:
    """The values that a trial has for these hyperparameters, in words."""
    return ", ".join(f"{name} {_shown(getattr(hp, name))}" for name in names)


def failures(trials: Sequence[Trial], names: Iterable[str]) -> list[str]:
    """A line for each trial that failed, with its reason."""
    return [
        f"Trial {number} ({chosen(result.hp, names)}): {result.failure}" for number, result in trials if result.failure
    ]


def write_table(trials: Sequence[Trial], names: Sequence[str], path: Path) -> None:
    """One line per trial, best first; accuracy from 0 to 1, empty if the trial failed."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        far = ["trained_epochs"] if are_cut(trials) else []
        table.writerow(["trial", *names, *far, "validation_accuracy", "seconds", "report", "failure"])
        for number, result in trials:
            values = [getattr(result.hp, name) for name in names] + [result.hp.last_epoch for _ in far]
            accuracy = "" if result.failure else result.accuracy
            table.writerow([number, *values, accuracy, f"{result.seconds:.1f}", result.report, result.failure])


def comparison(trials: Sequence[Trial], names: Sequence[str], saving: str = "") -> str:
    """The content of <body>; the first trial is the best and has not failed.

    saving: how trials were cut; empty without successive halving.
    """
    best, failed = trials[0].result, failures(trials, names)
    accuracy, images = best.accuracy, best.held_out
    share = (accuracy * images + 1) / (images + 2)  # otherwise zero errors would mean certainty
    chance = 2 * (share * (1 - share) / images) ** 0.5
    meaning = (
        f"Share of the {images:,} held-out training images that each trial classified correctly after its last epoch; "
        "the figures show the share of errors. "
        f"Trials within {chance:.1%} of each other may differ by chance alone."
    )
    advice = (
        "No trial has seen the test images. The best hyperparameters are then used to train on all training images; "
        "that run's report has the accuracy on the test images, which is the one to quote."
    )
    texts = [meaning, f"Trained: {saving}.", advice] if saving else [meaning, advice]
    far = ["trained epochs"] if are_cut(trials) else []
    heads = ["Trial", *names, *far, "validation accuracy", "seconds"]
    lines = [_line(trial, names, bool(far)) for trial in trials]
    figures = [_figure(name, trials) for name in names]
    others = [(name, _shown(value)) for name, value in vars(best.hp).items() if name not in names]
    sections = [
        Section("Validation accuracy", texts, figures, "Trials, best first", heads, lines),
        *([Section("Failed", failed)] if failed else []),
        Section("Set-up", (), (), "Common to all trials", ["Hyperparameter", "value"], others),
    ]
    title = f"Sweep on {best.hp.dataset}: {len(trials)} trials"
    return article(title, f"Best: {chosen(best.hp, names)}, with {accuracy:.2%} validation accuracy", sections)


def _line(trial: Trial, names: Sequence[str], has_epochs: bool) -> list[str]:
    result = trial.result
    values = [_shown(getattr(result.hp, name)) for name in names]
    values += [str(result.hp.last_epoch)] if has_epochs else []
    return [
        str(trial.number),
        *values,
        "failed" if result.failure else f"{result.accuracy:.2%}",
        f"{result.seconds:.1f}",
    ]


def _figure(name: str, trials: Sequence[Trial]) -> Drawing:
    values = [getattr(trial.result.hp, name) for trial in trials]
    numeric = all(type(value) in (int, float) for value in values)
    x = values if numeric else [_shown(value) for value in values]
    errors = [
        None if result.failure else max(1 - result.accuracy, 0.5 / result.held_out)  # the axis is logarithmic
        for _, result in trials
    ]
    return Drawing(f"By {name}", scatter(name, x, "validation errors", errors))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')
