"""Successive halving: after each rung only the best trials continue, from their checkpoints.

As in a bracket of Hyperband (Li et al., 2018): with a reduction factor of 3, nine trials of nine epochs train for one
epoch, the best three of them for two more, and the best of those for the remaining six.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.page import failures, ranked
from flyte_ddp.sweep.search import Sweep, TrialResult

NO_RESULT = "no result: the log of its pod says why"
Results = Sequence[TrialResult | None]


class Rung(NamedTuple):
    """trials: how many run in it. stop_after: the number of epochs, from the start, after which they stop; 0 is all."""

    trials: int
    stop_after: int


class Entrant(NamedTuple):
    """A trial in a rung. checkpoint: what it continues from; empty to train from the start."""

    number: int
    hp: Hyperparameters
    checkpoint: str


def rungs_of(sweep: Sweep, trials: Sequence[Hyperparameters]) -> list[Rung]:
    """As many rungs as the numbers of epochs and trials allow; a single one if no trials are cut."""
    factor, epochs, last = sweep.reduction_factor, trials[0].epochs, 0
    while factor > 1 and factor ** (last + 1) <= min(epochs, len(trials)):
        last += 1
    cut = [Rung(len(trials) // factor**rung, epochs // factor ** (last - rung)) for rung in range(last)]
    return [*cut, Rung(len(trials) // factor**last, 0)]


def check_rungs(sweep: Sweep, trials: Sequence[Hyperparameters]) -> None:
    """Raises InputError if trials cannot be compared after a rung, or if none would be cut."""
    factor, epochs = sweep.reduction_factor, trials[0].epochs
    if factor == 1:
        return
    if any(hp.epochs != epochs or hp.stop_after for hp in trials):
        raise InputError(
            f"Sweep.reduction_factor must be 1 if trials differ in epochs or set stop_after, got {factor}: leave these "
            "out, because the factor decides how long each trial trains"
        )
    if len(rungs_of(sweep, trials)) == 1:
        raise InputError(
            f"Sweep.reduction_factor must be at most the numbers of epochs ({epochs}) and trials ({len(trials)}), got "
            f"{factor}: otherwise no trials can be cut, so raise these or lower the factor"
        )


def standings(sweep: Sweep, trials: Sequence[Hyperparameters], results: Sequence[Results]) -> list[TrialResult]:
    """The latest result of each trial, given the results of the rungs so far; seconds are the sum over its rungs."""
    latest = [TrialResult(hp) for hp in trials]
    for rung, found in zip(rungs_of(sweep, trials), results, strict=False):
        for entrant, result in zip(_entrants(rung, trials, latest), found, strict=True):
            result, before = result or TrialResult(entrant.hp, failure=NO_RESULT), latest[entrant.number - 1]
            latest[entrant.number - 1] = replace(result, seconds=before.seconds + result.seconds)
    return latest


def entrants(sweep: Sweep, trials: Sequence[Hyperparameters], results: Sequence[Results]) -> list[Entrant]:
    """The trials of the next rung, given the results of the rungs so far; ReportedError if all trials have failed."""
    latest = standings(sweep, trials, results)
    found = _entrants(rungs_of(sweep, trials)[len(results)], trials, latest)
    if not found:
        raise all_failed(sweep, latest)
    return found


def _entrants(rung: Rung, trials: Sequence[Hyperparameters], latest: Sequence[TrialResult]) -> list[Entrant]:
    """The best trials that have not failed, in their original order; a trial cut earlier can replace a failed one."""
    best = {number for number, result in ranked(latest)[: rung.trials] if not result.failure}
    return [
        Entrant(number, replace(hp, stop_after=rung.stop_after or hp.stop_after), result.checkpoint)
        for number, (hp, result) in enumerate(zip(trials, latest, strict=True), 1)
        if number in best
    ]


def all_failed(sweep: Sweep, results: Sequence[TrialResult]) -> ReportedError:
    reasons = failures(ranked(results), list(sweep.values))
    return ReportedError("\n".join(["Every trial of the sweep failed:", *reasons]))


def saving(sweep: Sweep, trials: Sequence[Hyperparameters], results: Sequence[TrialResult]) -> str:
    """How the trials were cut, and how many epochs that saved, in words; empty without successive halving."""
    first, *others = rungs_of(sweep, trials)
    if not others:
        return ""
    epochs = trials[0].epochs
    steps = [f"the best {trials} to epoch {stop or epochs}" for trials, stop in others]
    trained = sum(result.hp.last_epoch for result in results)
    return (
        f"{trained} epochs instead of {epochs * len(trials)}: all {first.trials} trials trained to epoch "
        f"{first.stop_after}, {', '.join(steps)}"
    )
