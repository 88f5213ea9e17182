"""The trials of a sweep side by side, on any platform: a table as CSV, and a page."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flyte_ddp.attempt.folders import run_folder, write_page
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.console import say_last
from flyte_ddp.report.figures import scatter
from flyte_ddp.report.words import capitalised, format_measure, in_words
from flyte_ddp.sweep.halving import (
    AllTrials,
    Ranked,
    Rungs,
    all_failed,
    describe_saving,
    latest_results,
    list_failures,
    rank_trials,
    value_text,
)
from flyte_ddp.sweep.search import Sweep

PERCENT = ("accuracy",)


class Best(NamedTuple):
    """The number of the best trial, and files with all trials, as a table and as a page."""

    number: int
    table: Path
    report: Path


def write_comparison(platform: Platform, sweep: Sweep, trials: AllTrials, rungs: Rungs, subject: str) -> Best:
    """Rank the trials by the sweep's measure, write trials.csv and the page, and print which trial is the best.

    The files are in a new folder for this run's outputs. The page is also the task's Deck or report.

    Args:
        platform: the platform.
        sweep: the sweep.
        trials: the settings of each trial.
        rungs: the results of each rung's entrants, in their order.
        subject: the name of what the trials train on.

    Returns:
        The number of the best trial, and the paths of the table and the page.

    Raises:
        ReportedError: all trials have failed.
        InputError: the results have measures, but none has the sweep's; the sweep looks for the largest value of a
            measure of which lower is better; or the folder cannot be written to. On a cluster, the errors are raised as
            the platform's.
    """
    with run_folder(platform, f"sweep-{subject}") as folder:
        latest = latest_results(sweep, trials, rungs)
        ranking = rank_trials(sweep, latest)
        table = folder / "trials.csv"
        if ranking[0].result.failure:
            raise all_failed(sweep, latest)
        write_table(sweep, ranking, table)
        report = write_page(platform, folder, f"Sweep of {subject}", render_comparison(sweep, ranking, subject))
    spared = describe_saving(sweep, latest)
    said = [f"\nBest:     {describe_trial(sweep, ranking[0])}", *([f"Trained:  {spared}"] if spared else [])]
    where = [f"Trials:   {table}", f"Report:   {report}"] if platform.is_local() else []
    say_last("\n".join([*said, *where, ""]))
    return Best(ranking[0].number, table, report)


def list_heads(sweep: Sweep, trials: Sequence[Ranked]) -> list[str]:
    """Return the heads of the columns that the table and the page share. The first trial must not have failed."""
    best = trials[0].result
    epochs = ["trained_epochs"] if _are_cut(trials) else []
    return ["trial", *sweep.values, *epochs, *(f"{best.split}_{name}" for name in best.measures), "seconds"]


def write_table(sweep: Sweep, trials: Sequence[Ranked], path: Path) -> None:
    """Write a CSV file with a header and a line for each trial, in the given order.

    The columns are the number, the values tried, the epochs if any trial was cut, the measures of the first trial,
    seconds, report and failure. Measures that a trial lacks, and all of a failed trial, are empty. Raises OSError.

    Args:
        sweep: the sweep.
        trials: the trials, best first. The first one must not have failed.
        path: the file, which is overwritten.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*list_heads(sweep, trials), "report", "failure"])
        for trial in trials:
            values = [trial.settings[name] for name in sweep.values]
            if _are_cut(trials):
                values.append(trial.epochs)
            result = trial.result
            # The columns are the best trial's measures: what a trial measures may depend on its settings
            measures = ["" if result.failure else result.measures.get(name, "") for name in trials[0].result.measures]
            table.writerow([trial.number, *values, *measures, f"{result.seconds:.1f}", result.report, result.failure])


def render_comparison(sweep: Sweep, trials: Sequence[Ranked], subject: str) -> str:
    """Return the page that compares the trials, as the HTML content of <body>.

    Args:
        sweep: the sweep.
        trials: the trials, best first by the sweep's measure. The first one must not have failed.
        subject: the name of what the trials train on, for the title "Sweep of ...".
    """
    best = trials[0]
    measure = in_words(sweep.measure)
    result = best.result
    split = best.result.split
    spared = describe_saving(sweep, sorted(trials))
    order = "largest" if sweep.largest else "smallest"
    paragraphs = [f"By {measure} on {result.samples:,} {split} samples after the last epoch, {order} first."]
    if sweep.measure == "accuracy" and result.samples:
        paragraphs[0] += " The figures show the share of errors."
        # One more right and one more wrong sample: without them, zero errors would mean certainty
        fraction = (result.measures["accuracy"] * result.samples + 1) / (result.samples + 2)
        chance = 2 * (fraction * (1 - fraction) / result.samples) ** 0.5
        paragraphs.append(f"Trials within {chance:.1%} of each other may differ by chance alone.")
    paragraphs += [f"Trained: {spared}."] if spared else []
    advice = "Trials were not compared on the test samples" if split == "validation" else "There were no others"
    paragraphs.append(f"{advice}: quote what the best settings give on samples that chose nothing.")
    others = [(name, value_text(value)) for name, value in best.settings.items() if name not in sweep.values]
    heads = [head if head in sweep.values else capitalised(in_words(head)) for head in list_heads(sweep, trials)]
    lines = [_cells(sweep, trial, trials) for trial in trials]
    figures = [_figure(sweep, name, trials) for name in sweep.values]
    failed = list_failures(sweep, trials)
    sections = [
        Section("Trials", paragraphs, figures, "Trials, best first", heads, lines),
        *([Section("Failed", failed)] if failed else []),
        Section("Set-up", caption="Common to all trials", heads=("Setting", "value"), lines=others),
    ]
    return article(f"Sweep of {subject}: {len(trials)} trials", f"Best: {describe_trial(sweep, best)}", sections)


def describe_trial(sweep: Sweep, trial: Ranked) -> str:
    value = format_measure(sweep.measure, trial.result.measures[sweep.measure], PERCENT)
    return f"{trial.values(sweep.values)}: {trial.result.split} {in_words(sweep.measure)} {value}"


def _are_cut(trials: Sequence[Ranked]) -> bool:
    return any(trial.result.stop_after for trial in trials)


def _cells(sweep: Sweep, trial: Ranked, trials: Sequence[Ranked]) -> list[str]:
    result = trial.result
    cells = [str(trial.number), *(value_text(trial.settings[name]) for name in sweep.values)]
    if _are_cut(trials):
        cells.append(str(trial.epochs))
    for name in trials[0].result.measures:
        value = result.measures.get(name, math.nan)
        cells.append("failed" if result.failure else format_measure(name, value, PERCENT))
    return [*cells, f"{result.seconds:.1f}"]


def _figure(sweep: Sweep, name: str, trials: Sequence[Ranked]) -> Drawing:
    values = [trial.settings[name] for trial in trials]
    numeric = all(type(value) in (int, float) for value in values)
    x = values if numeric else [value_text(value) for value in values]
    y = [None if trial.result.failure else trial.result.measures[sweep.measure] for trial in trials]
    if sweep.measure != "accuracy" or not trials[0].result.samples:  # some loaders of Lightning don't tell the samples
        return Drawing(f"By {name}", scatter(name, x, in_words(sweep.measure), y))
    least = 0.5 / trials[0].result.samples  # the axis is logarithmic
    errors = [None if accuracy is None else max(1 - accuracy, least) for accuracy in y]
    return Drawing(f"By {name}", scatter(name, x, f"{trials[0].result.split} errors", errors, are_fractions=True))
