"""Successive halving: after each rung only the best trials continue, from their checkpoints.

This is a bracket of Hyperband (Li et al., 2018): with a reduction factor of 3, nine trials of nine epochs train for one
epoch, the best three of them for two more, and the best of those for the remaining six. A factor of 1 cuts none.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flyte_ddp.attempt.datasets import check_ranks
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.summaries import RunSummary
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.launch.failures import Failure, RankError, from_exception
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import say
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.search import Sweep, trials_of

VALIDATION_FRACTION = 1 / 12  # leaves 55,000 of MNIST's images to train on, and 5,000 to compare by
NO_RESULT = "no result: the log of its pod says why"


class Rung(NamedTuple):
    """A rung of the ladder.

    Attributes:
        trials: how many trials run in it.
        stop_after: the number of epochs, from the start, after which the trials stop; 0 is all.
    """

    trials: int
    stop_after: int


@dataclass(frozen=True)
class Entrant:
    """A trial in a rung.

    Attributes:
        settings: the trial's settings as JSON.
        checkpoint: the checkpoint that the trial continues from; empty to train from the start.
    """

    settings: str
    checkpoint: str = ""


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial.

    Attributes:
        measures: measures by name after the last epoch, on the samples that trials are compared on.
        samples: how many samples trials are compared on.
        split: the split of these samples: validation or, if there is none, test.
        seconds: the time of training, from the checkpoint that it continued from.
        report: path or address of the trial's page.
        failure: why there are no measures; empty if there are.
        checkpoint: path or address of the checkpoint to continue from; empty if training is complete.
        stop_after: the number of epochs, in total, after which the trial was stopped; 0 if it was not.
        lower_is_better: names of the measures besides the loss of which the recipe says so.
    """

    measures: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    split: str = "validation"
    seconds: float = 0.0
    report: str = ""
    failure: str = ""
    checkpoint: str = ""
    stop_after: int = 0
    lower_is_better: list[str] = field(default_factory=list)


AllTrials = Sequence[Mapping[str, Any]]  # the settings of each trial, by name
Rungs = list[list[TrialResult | None]]  # the results of each rung's entrants; None where a pod has failed for good


class Ranked(NamedTuple):
    """A trial's number in the sweep, from 1, its settings and its latest result."""

    number: int
    settings: Mapping[str, Any]
    result: TrialResult

    @property
    def epochs(self) -> int:
        """Return how many epochs the trial has trained."""
        return int(self.result.stop_after or self.settings["epochs"])

    def values(self, names: Iterable[str]) -> str:
        """Return the trial's values of these settings, in words."""
        return ", ".join(f"{name} {value_text(self.settings[name])}" for name in names)


def value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')


def plan_rungs(sweep: Sweep, trials: AllTrials) -> list[Rung]:
    """Return the rungs of the sweep, as many as the numbers of epochs and trials allow; one if no trials are cut.

    A rung is a stage of the sweep, after which only the best trials go on. With n rungs and a reduction factor f, the
    first rung has all trials and stops after epochs / f^(n - 1). Each next rung has an f-th of the trials and stops
    after f times the epochs, all rounded down. The last rung trains to the end (stop_after 0). If trials are cut, all
    have the same number of epochs, as check_reduction_factor() checks.
    """
    factor = sweep.reduction_factor
    epochs = trials[0]["epochs"]
    last = 0
    while factor > 1 and factor ** (last + 1) <= min(epochs, len(trials)):
        last += 1
    cut = [Rung(len(trials) // factor**rung, epochs // factor ** (last - rung)) for rung in range(last)]
    return [*cut, Rung(len(trials) // factor**last, 0)]


def check_reduction_factor(sweep: Sweep, trials: AllTrials) -> None:
    """Raise InputError if the sweep's reduction factor does not fit its trials.

    A factor of 1 always fits. A larger one is refused in four cases: the trials are trained by Lightning, they differ
    in epochs, one of them sets stop_after, or the factor is larger than the number of epochs or of trials.
    """
    factor = sweep.reduction_factor
    epochs = trials[0]["epochs"]
    if factor == 1:
        return
    if "stop_after" not in trials[0]:
        raise InputError(
            f"Sweep.reduction_factor must be 1 under Lightning, where no training continues another one, got {factor}"
        )
    if any(trial["epochs"] != epochs or trial["stop_after"] for trial in trials):
        raise InputError(
            f"Sweep.reduction_factor must be 1 if trials differ in epochs or set stop_after, got {factor}: leave these "
            "out, because the factor decides how long each trial trains"
        )
    if len(plan_rungs(sweep, trials)) == 1:
        raise InputError(
            f"Sweep.reduction_factor must be at most the numbers of epochs ({epochs}) and trials ({len(trials)}), got "
            f"{factor}: otherwise no trials can be cut, so raise these or lower the factor"
        )


def classifier_trials(
    platform: Platform, sweep: Sweep, hp: Hyperparameters, options: RunOptions
) -> list[Hyperparameters]:
    """Return the hyperparameters of each trial of an image classifier, after checking all of them.

    Call this function before anything is downloaded or spawned.

    Raises:
        InputError: the sweep does not look for the largest accuracy, a value cannot be tried, the reduction factor does
            not fit the trials, patience or keep_best is set without a validation split, or, in a local run, this
            machine cannot run the ranks of a trial.
    """
    if (sweep.measure, sweep.largest) != ("accuracy", True):
        raise InputError(f"Sweep.measure must be accuracy for image classifiers, largest first, got {sweep.measure!r}")
    trials = trials_of(sweep, hp)
    check_reduction_factor(sweep, [vars(trial) for trial in trials])
    for trial in trials:
        check_ranks(platform, trial, options)
    return trials


def run_rungs(sweep: Sweep, trials: AllTrials, run: Callable[[Entrant], TrialResult]) -> Rungs:
    """Run the trials of each rung one after another, and return the results of each rung's entrants, in their order.

    A rung is a stage of the sweep, after which only the best trials go on. Each trial's values are printed before `run`
    trains it. If `run` raises InputError or RankError, this trial has failed, and the sweep continues. Any other
    exception of `run` ends the sweep.

    Args:
        sweep: the sweep.
        trials: the settings of each trial.
        run: trains a trial and returns its result.

    Raises:
        ReportedError: all trials have failed, and there is another rung to run.
        InputError: there is another rung to run, and the results so far have measures, but none has the sweep's; or
            the sweep looks for the largest value of a measure of which lower is better.
    """
    rungs: Rungs = []
    for rung in plan_rungs(sweep, trials):
        results: list[TrialResult | None] = []
        for number, entrant in choose_entrants(sweep, trials, rungs).items():
            trial = Ranked(number, trials[number - 1], TrialResult(stop_after=rung.stop_after))
            until = f", to epoch {trial.epochs} of {trial.settings['epochs']}" if sweep.reduction_factor > 1 else ""
            say(f"\nTrial {number} of {len(trials)}: {trial.values(sweep.values)}{until}")
            try:
                results.append(run(entrant))
            except (InputError, RankError) as error:  # the trial's settings are wrong, or its training has failed
                results.append(failed_result(getattr(error, "failure", None) or from_exception(error, None, "")))
        rungs.append(results)
    return rungs


def make_result(
    figures: RunSummary, measures: dict[str, float], loss: float, report: str, checkpoint: str
) -> TrialResult:
    """Build the result of a trial whose training has ended. A loss that is not finite makes it a failure.

    Args:
        figures: the training's summary.
        measures: the measures after the last epoch, on the samples that trials are compared on.
        loss: the loss after the last epoch, on any split; only whether it is finite counts.
        report: path or URL of the training's page.
        checkpoint: path or URL of the checkpoint that the next rung continues from; empty if training is complete.
    """
    return TrialResult(
        measures=measures,
        samples=figures.validation_samples or figures.test_samples,
        split="validation" if figures.validation_samples else "test",
        seconds=figures.total_seconds,
        report=report,
        failure="" if math.isfinite(loss) else "diverged: the loss after the last epoch is not finite",
        checkpoint=checkpoint,
        lower_is_better=figures.lower_is_better,
    )


def failed_result(failure: Failure, seconds: float = 0.0) -> TrialResult:
    """Print why a trial failed, and return its result, which has no measures."""
    reason = f"{failure.cause}: {failure.message}"
    say(f"This trial failed, the sweep continues: {reason}")
    return TrialResult(seconds=seconds, failure=reason)


def choose_entrants(
    sweep: Sweep, trials: AllTrials, rungs: Sequence[Sequence[TrialResult | None]]
) -> dict[int, Entrant]:
    """Choose the trials of the sweep's next rung by the results of its rungs so far.

    A rung is a stage of the sweep, after which only the best trials go on. Failed trials don't enter. If too many have
    failed, trials that an earlier rung has cut enter again.

    Args:
        sweep: the sweep.
        trials: the settings of each trial.
        rungs: the results of each rung so far, in the order in which this function has returned the rung's entrants.
            None is a lost result, which counts as a failure. Without any rung, all trials enter.

    Returns:
        The entrants by the trials' numbers, which count from 1, in ascending order.

    Raises:
        ReportedError: All trials have failed.
        InputError: The results have measures, but none has the sweep's; or the sweep looks for the largest value of a
            measure of which lower is better.
    """
    latest = latest_results(sweep, trials, rungs)
    advancing = _best_entrants(sweep, plan_rungs(sweep, trials)[len(rungs)], latest)
    if not advancing:
        raise all_failed(sweep, latest)
    return advancing


def latest_results(sweep: Sweep, trials: AllTrials, rungs: Sequence[Sequence[TrialResult | None]]) -> list[Ranked]:
    """Return all trials in the order of their numbers, each with the result of the last rung that it was in.

    The result's seconds are the sum over the trial's rungs. A lost result (None) is a failure, and so is a result in
    which the sweep's measure is missing or not finite. A trial that was in no rung yet has an empty TrialResult, which
    is no failure.

    Args:
        sweep: the sweep.
        trials: the settings of each trial.
        rungs: the results of each rung so far, in the order in which choose_entrants() has returned the rung's
            entrants.

    Raises:
        InputError: there are results of several rungs, and those before the last have measures, but none has the
            sweep's; or the sweep looks for the largest value of a measure of which lower is better.
    """
    latest = [Ranked(number, settings, TrialResult()) for number, settings in enumerate(trials, 1)]
    for rung, results in zip(plan_rungs(sweep, trials), rungs, strict=False):
        for number, result in zip(_best_entrants(sweep, rung, latest), results, strict=True):
            before = latest[number - 1]
            result = _check_measure(sweep, result or TrialResult(failure=NO_RESULT))
            seconds = before.result.seconds + result.seconds
            stop_after = rung.stop_after or before.settings.get("stop_after", 0)  # Lightning's settings have none
            latest[number - 1] = before._replace(result=replace(result, stop_after=stop_after, seconds=seconds))
    return latest


def _check_measure(sweep: Sweep, result: TrialResult) -> TrialResult:
    """Return the result, turned into a failure if the sweep's measure is missing or not finite.

    Otherwise such a trial could come out as the best. A result that has failed already is returned unchanged.
    """
    if result.failure:
        return result
    if sweep.measure not in result.measures:
        others = f", but {', '.join(result.measures)}" if result.measures else ""
        return replace(result, failure=f"it has no measure {sweep.measure}{others}")
    value = result.measures[sweep.measure]
    if math.isfinite(value):
        return result
    return replace(result, failure=f"{sweep.measure} after the last epoch is not finite ({value})")


def _best_entrants(sweep: Sweep, rung: Rung, latest: Sequence[Ranked]) -> dict[int, Entrant]:
    """Return the entrants of a rung, the best trials by their latest results, by number in ascending order.

    There are at most `rung.trials`, and none that has failed. A trial that was cut in an earlier rung takes part again
    if too many others have failed. The entrants' settings get rung.stop_after, unless that is 0.

    Raises:
        InputError: the results have measures, but none has the sweep's; or the sweep looks for the largest value of a
            measure of which lower is better.
    """
    best = rank_trials(sweep, latest)[: rung.trials]
    stop = {"stop_after": rung.stop_after} if rung.stop_after else {}
    return {
        number: Entrant(json.dumps({**settings, **stop}), result.checkpoint)
        for number, settings, result in sorted(best)
        if not result.failure
    }


def rank_trials(sweep: Sweep, latest: Sequence[Ranked]) -> list[Ranked]:
    """Return the trials, as latest_results() returns them, in a new list from best to worst.

    The trials are sorted by three keys; ties keep their order:
    1. Failed trials come last.
    2. Trials that were not stopped early come first, then those that were stopped after more epochs.
    3. The sweep's measure decides. Trials without a finite measure come last.

    Raises:
        InputError: the results have measures, but none has the sweep's; or the sweep looks for the largest value of a
            measure of which the recipe says that lower is better.
    """

    def order(trial: Ranked) -> tuple[bool, float, float]:
        value = trial.result.measures.get(sweep.measure, math.nan)
        value = -value if sweep.largest else value
        score = value if math.isfinite(value) else math.inf
        return bool(trial.result.failure), -(trial.result.stop_after or math.inf), score

    measures = dict.fromkeys(itertools.chain.from_iterable(trial.result.measures for trial in latest))
    if measures and sweep.measure not in measures:
        raise InputError(f"Sweep.measure must be one of {', '.join(measures)}, got {sweep.measure!r}")
    if sweep.largest and any(sweep.measure in trial.result.lower_is_better for trial in latest):
        raise InputError(
            f"Sweep.largest must be false for {sweep.measure}, got true: the recipe's lower_is_better names it, so the "
            "largest is that of the worst trial; set it to false, and the trials come from the cache"
        )
    return sorted(latest, key=order)


def all_failed(sweep: Sweep, latest: Sequence[Ranked]) -> ReportedError:
    return ReportedError("\n".join(["Every trial of the sweep failed:", *list_failures(sweep, latest)]))


def list_failures(sweep: Sweep, latest: Sequence[Ranked]) -> list[str]:
    """Return a line for each trial that failed, with its number, its values and the reason."""
    return [
        f"Trial {trial.number} ({trial.values(sweep.values)}): {trial.result.failure}"
        for trial in latest
        if trial.result.failure
    ]


def describe_saving(sweep: Sweep, latest: Sequence[Ranked]) -> str:
    """Return a sentence on how the trials were cut, and how many epochs that saved; "" without successive halving.

    Args:
        sweep: the sweep.
        latest: the latest result of each trial, in any order; at least one.
    """
    epochs = latest[0].settings["epochs"]
    first, *others = plan_rungs(sweep, [trial.settings for trial in latest])
    if not others:
        return ""
    steps = [f"the best {trials} to epoch {stop or epochs}" for trials, stop in others]
    return (
        f"{sum(trial.epochs for trial in latest)} epochs instead of {epochs * len(latest)}: all {first.trials} trials "
        f"trained to epoch {first.stop_after}, {', '.join(steps)}"
    )
