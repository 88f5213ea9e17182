"""A sweep over the settings of a user's recipe, in a @dynamic of their workflow file:

@dynamic(**dynamic_resources())
def sweep_model(sweep: Sweep, settings: Settings, options: RunOptions) -> RunComparison:
    trials = trials_of(sweep, settings)
    summaries = [train_model(settings=trial, options=options).summary for trial in trials]
    return compare_runs(sweep=sweep, trials=as_json(trials), summaries=summaries, measure="loss", largest=False)
"""

import csv
import math
from collections.abc import Sequence
from typing import NamedTuple

from flytekit import task
from flytekit.types.file import FlyteFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.summaries import RecipeSummary
from flyte_ddp.errors import InputError
from flyte_ddp.report.article import Section, article
from flyte_ddp.report.console import say_last
from flyte_ddp.settings import TrainingSettings, read_json
from flyte_ddp.sweep.search import Sweep
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.outputs import output_file, output_page
from flyte_ddp.tasks.platform import is_local
from flyte_ddp.tasks.resources import small_resources


class RunComparison(NamedTuple):
    """The trials of a sweep side by side.

    Attributes:
        best: the settings of the best trial, as JSON.
        table: all trials, best first.
        report: an HTML page in a single file.
    """

    best: str
    table: FlyteFile["csv"]
    report: FlyteFile["html"]  # noqa: F821


def as_json(trials: Sequence[TrainingSettings]) -> list[str]:
    return [trial.to_json() for trial in trials]


@task(enable_deck=True, deck_fields=(), **small_resources())
@platform_errors(platform)
def compare_runs(
    sweep: Sweep, trials: list[str], summaries: list[RecipeSummary], measure: str, largest: bool
) -> RunComparison:
    """Ranks the trials by a measure, largest or smallest first: on the validation samples if all trials have them, else
    on the test samples."""
    is_validated = all(summary.validation_measures for summary in summaries)
    measured = [summary.validation_measures if is_validated else summary.measures for summary in summaries]
    missing = [one for one in measured if measure not in one]
    if missing:
        raise InputError(f"measure must be one of {', '.join(missing[0])}, got {measure!r}")

    def worse(row: "tuple[int, str, RecipeSummary, dict[str, float]]") -> float:
        value = row[3][measure]
        return math.inf if math.isnan(value) else -value if largest else value

    ranking = sorted(zip(range(1, len(trials) + 1), trials, summaries, measured, strict=True), key=worse)
    names, measures = list(sweep.values), list(measured[0])
    heads = ["trial", *names, *measures, "seconds"]
    lines = [
        [str(number), *(str(read_json(trial)[name]) for name in names)]
        + [f"{values[name]:.6g}" for name in measures]
        + [f"{summary.total_seconds:.1f}"]
        for number, trial, summary, values in ranking
    ]
    recipe, best = summaries[0].recipe, ranking[0]
    chosen = ", ".join(f"{name} {value}" for name, value in zip(names, lines[0][1:], strict=False))
    summary = f"{chosen}: {measure} {best[3][measure]:.6g}"
    with run_folder(platform, f"sweep-{recipe.rpartition(':')[2]}") as folder:
        with open(folder / "trials.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([heads, *lines])
        order = "largest" if largest else "smallest"
        split = "validation" if is_validated else "test"
        text = f"By {measure} on the {split} split, {order} first. Test the best trial on another split."
        section = Section("Trials", [text], (), "Best first", heads, lines)
        fragment = article(f"Sweep of {recipe}: {len(trials)} trials", f"Best: {summary}", [section])
        report = output_page(folder, f"Sweep of {recipe}", fragment)
    say_last(f"\nBest:     {summary}" + (f"\nTrials:   {folder / 'trials.csv'}\n" if is_local() else ""))
    return RunComparison(best[1], output_file(folder / "trials.csv"), report)
