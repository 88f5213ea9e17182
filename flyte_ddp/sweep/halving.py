"""Successive halving: trials are cut on the way, and the better ones go on from where they were.

As in a bracket of Hyperband (Li et al., 2018): with a reduction factor of 3, nine trials of nine epochs train for one
epoch, the best three of them for two more, and the best one of these for the other six.
"""

from dataclasses import replace
from typing import List, NamedTuple, Optional, Sequence

from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.page import failures, ranked
from flyte_ddp.sweep.search import Sweep, TrialResult

NO_RESULT = "no result even after Flyte's retries: the log of its pod says why"
Results = Sequence[Optional[TrialResult]]


class Rung(NamedTuple):
    """trials: how many it has. stop_after: the epochs, from the start on, that it takes them to; 0 is all."""

    trials: int
    stop_after: int


class Entrant(NamedTuple):
    """What a rung trains. checkpoint: what it goes on from; empty is the start."""

    number: int
    hp: Hyperparameters
    checkpoint: str


def rungs_of(sweep: Sweep, trials: Sequence[Hyperparameters]) -> List[Rung]:
    """As many as the epochs and the trials allow; a single one where nothing is cut."""
    factor, epochs, last = sweep.reduction_factor, trials[0].epochs, 0
    while factor > 1 and factor ** (last + 1) <= min(epochs, len(trials)):
        last += 1
    cut = [Rung(len(trials) // factor**rung, epochs // factor ** (last - rung)) for rung in range(last)]
    return [*cut, Rung(len(trials) // factor**last, 0)]


def check_rungs(sweep: Sweep, trials: Sequence[Hyperparameters]) -> None:
    """Raises InputError where trials cannot be compared on the way, or none would be cut."""
    factor, epochs = sweep.reduction_factor, trials[0].epochs
    if factor == 1:
        return
    if any(hp.epochs != epochs or hp.stop_after for hp in trials):
        raise InputError(
            f"Sweep.reduction_factor must be 1 where trials have epochs or a stop_after of their own, got {factor}: "
            "leave these out, for it decides how far each trial goes"
        )
    if len(rungs_of(sweep, trials)) == 1:
        raise InputError(
            f"Sweep.reduction_factor must be at most the epochs ({epochs}) and the trials ({len(trials)}), got "
            f"{factor}: with fewer nothing can be cut, so raise them, or lower it"
        )


def standings(sweep: Sweep, trials: Sequence[Hyperparameters], results: Sequence[Results]) -> List[TrialResult]:
    """What came of each trial in the last rung that it was in, of the rungs with these results; seconds are of all."""
    latest = [TrialResult(hp) for hp in trials]
    for rung, found in zip(rungs_of(sweep, trials), results, strict=False):
        for entrant, result in zip(_entrants(rung, trials, latest), found, strict=True):
            result, before = result or TrialResult(entrant.hp, failure=NO_RESULT), latest[entrant.number - 1]
            latest[entrant.number - 1] = replace(result, seconds=before.seconds + result.seconds)
    return latest


def entrants(sweep: Sweep, trials: Sequence[Hyperparameters], results: Sequence[Results]) -> List[Entrant]:
    """Those of the rung after the ones with these results; raises ReportedError where all trials have failed."""
    latest = standings(sweep, trials, results)
    found = _entrants(rungs_of(sweep, trials)[len(results)], trials, latest)
    if not found:
        raise all_failed(sweep, latest)
    return found


def _entrants(rung: Rung, trials: Sequence[Hyperparameters], latest: Sequence[TrialResult]) -> List[Entrant]:
    """The best that have not failed, in the order of the trials; one that was cut takes the place of one that has."""
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
    """How the trials were cut, and what that has spared, in words; empty where none was to be."""
    first, *others = rungs_of(sweep, trials)
    if not others:
        return ""
    epochs = trials[0].epochs
    steps = [f"the best {trials} to epoch {stop or epochs}" for trials, stop in others]
    trained = sum(result.hp.last_epoch for result in results)
    return (
        f"{trained} epochs instead of {epochs * len(trials)}: all {first.trials} trials went to epoch "
        f"{first.stop_after}, {', '.join(steps)}"
    )
