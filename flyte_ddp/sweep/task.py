"""A sweep in Flyte: the parts of workflows/sweep.py, and of examples/tabular/sweep.py for a recipe of your own."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import FlyteContextManager, map_task, task
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.fields import read_json
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.outputs import output_file
from flyte_ddp.flyte1.platform import TaskError, is_local
from flyte_ddp.flyte1.recipe import RecipeOutputs
from flyte_ddp.flyte1.resources import small_resources
from flyte_ddp.flyte1.train import TrainingOutputs
from flyte_ddp.launch.failures import RankError
from flyte_ddp.sweep.halving import (
    Entrant,
    Rungs,
    TrialResult,
    check_reduction_factor,
    choose_entrants,
    failed_result,
    make_result,
    plan_rungs,
    run_rungs,
)
from flyte_ddp.sweep.page import write_comparison
from flyte_ddp.sweep.search import AnySettings, Sweep


class SweepComparison(NamedTuple):
    """The trials side by side.

    Attributes:
        best: the settings of the best trial, as JSON.
        table: all trials, best first.
        report: an HTML page in a single file.
    """

    best: str
    table: FlyteFile["csv"]  # noqa: F821
    report: FlyteFile["html"]  # noqa: F821


def run_sweep(sweep: Sweep, trials: Sequence[AnySettings], run: Any, subject: str, **inputs: Any) -> Any:
    """Run the trials and compare them, and return the promise of a SweepComparison. Call it in a @dynamic.

    On a cluster each rung, a stage of the sweep, is a map task over its trials, which fails only if all of its pods
    fail for good. A local run trains the trials within this call, one after another.

    Args:
        sweep: the sweep.
        trials: the settings of each trial.
        run: a task that trains one trial and returns a TrialResult. Its inputs are `entrant` and those in `inputs`.
        subject: the name of what the trials train on, for the report.
        inputs: inputs of `run` that all trials have in common.

    Raises:
        InputError: the sweep's reduction factor does not fit its trials; or it is above 1, although the trials start
            from a folder of weights; or, in a local run, the results have measures, but none has the sweep's.
        ReportedError: in a local run, all trials have failed.
    """
    settings = [dataclasses.asdict(trial) for trial in trials]
    check_reduction_factor(sweep, settings)
    if sweep.reduction_factor > 1:
        _refuse_folder(inputs.get("init"))
    texts = [trial.to_json() for trial in trials]
    if is_local():  # flytekit's local map task caches all trials or none; one by one, a sweep resumes
        rungs = run_rungs(sweep, settings, lambda entrant: _read_value(run(entrant=entrant, **inputs)))
    else:
        # With a ratio of 1, a single pod that fails permanently would fail the map task; Flyte requires more than 0
        run_all = map_task(partial(run, **inputs), concurrency=sweep.concurrency, min_success_ratio=1e-3)
        rungs = [run_all(entrant=list(choose_entrants(sweep, settings, []).values()))]
        for _ in plan_rungs(sweep, settings)[1:]:
            rungs.append(run_all(entrant=next_rung(sweep=sweep, trials=texts, rungs=rungs)))
    return compare_trials(sweep=sweep, trials=texts, rungs=rungs, subject=subject)


def _refuse_folder(init: Any) -> None:
    """Raise InputError if trials that are cut would start from a folder of weights."""
    if isinstance(init, FlyteDirectory):
        raise InputError(
            "Sweep.reduction_factor must be 1 where trials start from a folder of weights, which a trial that goes on "
            "from its checkpoint would lack: set it to 1"
        )


def _read_value(result: Any) -> TrialResult:
    """Return a task's output in a local run, where flytekit keeps outputs as literals."""
    value: TrialResult = TypeEngine.to_python_value(FlyteContextManager.current_context(), result.val, TrialResult)
    return value


def try_out(
    run: Callable[..., TrainingOutputs | RecipeOutputs], kind: type[AnySettings], entrant: Entrant, **inputs: Any
) -> TrialResult:
    """Train one trial of a rung, a stage of the sweep, and return its result.

    The trial continues from the entrant's checkpoint. If the checkpoint is gone, the trial trains from the start, with
    the same result. If a loss or another value is not finite, the result is a failure. Any other failure is raised, so
    that Flyte does not cache it.

    Args:
        run: trains, and returns the outputs. It is called as run(settings, **inputs), with the checkpoint as init if
            there is one.
        kind: the class of the settings.
        entrant: the trial: its settings as JSON, and its checkpoint.
        inputs: further inputs of `run`.

    Raises:
        RankError, TaskError: the training has failed for another reason than a value that is not finite.
        InputError: there are a checkpoint and, as init in `inputs`, a folder of weights.
    """
    started = time.time()
    storage = FlyteContextManager.current_context().file_access
    settings = kind.from_json(entrant.settings)
    checkpoint = entrant.checkpoint
    if checkpoint:  # run_sweep() may have seen only the promise of a folder
        _refuse_folder(inputs.get("init"))
    init = {"init": FlyteFile(checkpoint)} if checkpoint and storage.exists(checkpoint) else {}
    try:
        outputs = run(settings, **{**inputs, **init})
    except (RankError, TaskError) as error:
        if error.failure.cause != NonFiniteError.__name__:
            raise
        return failed_result(error.failure, time.time() - started)
    figures = outputs.summary
    report = outputs.report.path
    final = str(Path(outputs.logs.path, "final-checkpoint")) if settings.stop_after else ""
    if not is_local():  # a map task shows no Deck
        report, final = (path and storage.put_raw_data(path) for path in (report, final))
    if isinstance(outputs, RecipeOutputs):
        evaluated = outputs.epoch_measures or [{}]  # a loop of the user's own may return within its first epoch
        measures = evaluated[-1] or outputs.summary.measures  # Lightning without validation has no epochs'
        loss = measures.get("loss", 0.0)  # a LightningModule need not log its loss
    else:
        measures = {"accuracy": outputs.epoch_accuracies[-1]}
        loss = outputs.summary.test_loss
    return make_result(figures, measures, loss, report, final)


@task(**small_resources())
@platform_errors(platform)
def next_rung(sweep: Sweep, trials: list[str], rungs: Rungs) -> list[Entrant]:
    """Return the entrants of the rung after those whose results are given; a Flyte task.

    Raises ReportedError if all trials have failed, and InputError if they have measures, but none has the sweep's.
    """
    return list(choose_entrants(sweep, [read_json(trial) for trial in trials], rungs).values())


@task(enable_deck=True, deck_fields=(), **small_resources())
@platform_errors(platform)
def compare_trials(sweep: Sweep, trials: list[str], rungs: Rungs, subject: str) -> SweepComparison:
    """Rank the trials by the sweep's measure, and write the table and the page; a Flyte task.

    Raises ReportedError if all trials have failed, and InputError if they have measures, but none has the sweep's.
    """
    best = write_comparison(platform, sweep, [read_json(trial) for trial in trials], rungs, subject)
    return SweepComparison(trials[best.number - 1], output_file(best.table), output_file(best.report))
