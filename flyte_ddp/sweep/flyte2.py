"""A sweep in Flyte 2: the parts of flyte2/sweep.py."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from flyte import storage
from flyte.errors import BaseRuntimeError
from flyte.io import Dir, File

from flyte_ddp.errors import NonFiniteError
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.flyte2.data import output_file
from flyte_ddp.flyte2.train import image_training
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.background import one_line
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.halving import (
    Entrant,
    Rungs,
    TrialResult,
    choose_entrants,
    classifier_trials,
    failed_result,
    make_result,
    plan_rungs,
)
from flyte_ddp.sweep.page import write_comparison
from flyte_ddp.sweep.search import Sweep

Try = Callable[[Entrant], Awaitable[TrialResult]]


@dataclass(frozen=True)
class SweepComparison:
    """The trials side by side.

    Attributes:
        best: the hyperparameters of the best trial.
        table: all trials, best first.
        report: an HTML page in a single file.
    """

    best: Hyperparameters
    table: File
    report: File


def list_trials(sweep: Sweep, hp: Hyperparameters, options: RunOptions) -> list[Hyperparameters]:
    """Return the hyperparameters of each trial, all checked before anything is downloaded or spawned.

    Raises FinalError if the sweep or a trial is not valid, or if this machine cannot do a local run.
    """
    with one_attempt():
        return classifier_trials(platform, sweep, hp, options)


def try_out(entrant: Entrant, data: Dir, options: RunOptions) -> TrialResult:
    """Train one trial of a rung, a stage of the sweep, on the prepared dataset, and return its result.

    The trial continues from the entrant's checkpoint. If the checkpoint is gone, the trial trains from the start, with
    the same result. If a loss or another value is not finite, the result is a failure. Any other failure is raised, so
    that Flyte does not cache it.

    Args:
        entrant: the trial: its settings as JSON, and its checkpoint.
        data: the prepared dataset.
        options: how to run the training.

    Raises:
        FinalError: the training has failed for another reason, and would again. A local run raises it for any reason.
        AttemptError: on a cluster, the training has failed for a reason that may not recur.
    """
    started = time.time()
    hp = Hyperparameters.from_json(entrant.settings)
    there = entrant.checkpoint and storage.exists_sync(entrant.checkpoint)
    try:
        outputs = image_training.run(hp, options, data, File(path=entrant.checkpoint) if there else None)
    except Exception as error:
        failure = getattr(error, "failure", None)
        if failure is None or failure.cause != NonFiniteError.__name__:
            raise
        return failed_result(failure, time.time() - started)
    checkpoint = f"{outputs.logs.path}/final-checkpoint" if hp.stop_after else ""
    measures = {"accuracy": outputs.epoch_accuracies[-1]}
    loss = outputs.summary.test_loss
    return make_result(outputs.summary, measures, loss, outputs.report.path, checkpoint)


async def run_rungs(sweep: Sweep, trials: Sequence[Hyperparameters], run: Try) -> Rungs:
    """Run all rungs one after the other, and the trials of each rung side by side, sweep.concurrency at a time.

    A rung is a stage of the sweep, after which only the best trials go on.

    Args:
        sweep: the sweep.
        trials: the hyperparameters of all trials.
        run: trains an entrant in a task of its own. If the task fails or its pod is lost, the trial has failed, and the
            sweep continues.

    Returns:
        The results of each rung's entrants, in their order.

    Raises:
        FinalError: there is another rung to run, and all trials have failed, or none has the sweep's measure.
    """
    settings = [dataclasses.asdict(one) for one in trials]
    slots = asyncio.Semaphore(sweep.concurrency)
    rungs: Rungs = []

    async def attempt(entrant: Entrant) -> TrialResult:
        async with slots:
            try:
                return await run(entrant)
            except BaseRuntimeError as error:  # a lost pod, too, which is an error of the system
                return TrialResult(failure=f"{error.code}: {one_line(error)}")

    for _ in plan_rungs(sweep, settings):
        with one_attempt():
            entrants = choose_entrants(sweep, settings, rungs)
        rungs.append(await asyncio.gather(*map(attempt, entrants.values())))
    return rungs


def compare(sweep: Sweep, trials: Sequence[Hyperparameters], rungs: Rungs, subject: str) -> SweepComparison:
    """Rank the trials by the sweep's measure, and write the table and the page.

    Raises FinalError if all trials have failed, or none has the sweep's measure.
    """
    with one_attempt():
        best = write_comparison(platform, sweep, [dataclasses.asdict(one) for one in trials], rungs, subject)
        return SweepComparison(trials[best.number - 1], output_file(best.table), output_file(best.report))
