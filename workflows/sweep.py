"""Compares hyperparameters on held-out training images, then trains with the best on all training images.

pyflyte run workflows/sweep.py sweep_wf --sweep '{"values": {"learning_rate": [0.05, 0.1, 0.2]}}' --hp '{"epochs": 1}'
"""

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Cache, FlyteContextManager, dynamic, map_task, task, workflow
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.code_version import code_version
from flyte_ddp.errors import NonFiniteError
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.launch.failures import Failure, RankError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import say, say_last
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.halving import all_failed, check_rungs, entrants, rungs_of, saving, standings
from flyte_ddp.sweep.held_out import hold_out_validation
from flyte_ddp.sweep.page import chosen, comparison, ranked, write_table
from flyte_ddp.sweep.search import Sweep, TrialResult, trials_of
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.outputs import output_file, output_page
from flyte_ddp.tasks.platform import TaskError, is_local
from flyte_ddp.tasks.prepare import PreparedDataset, prepare_dataset, resolve_dataset
from flyte_ddp.tasks.pyflyte import set_up_pyflyte
from flyte_ddp.tasks.resources import dynamic_resources, small_resources, training_resources
from flyte_ddp.tasks.train import TRAINING_CODE, image_training
from workflows.mnist import pytorch_mnist_task

set_up_pyflyte()

TRIAL_CODE = CodeVersion(code_version("workflows.sweep"), ())
Rungs = list[list[TrialResult | None]]


class Comparison(NamedTuple):
    """The trials side by side.

    Attributes:
        best: the hyperparameters with the highest validation accuracy.
        table: all trials, best first.
        report: an HTML page in a single file.
    """

    best: Hyperparameters
    table: FlyteFile["csv"]  # noqa: F821
    report: FlyteFile["html"]  # noqa: F821


class SweepOutputs(NamedTuple):
    """The outputs of a sweep: a Comparison, and the outputs of training with the best on all training images.

    Attributes:
        model_state, summary, training_report, logs: see flyte_ddp.tasks.train.TrainingOutputs.
    """

    best: Hyperparameters
    table: FlyteFile["csv"]  # noqa: F821
    report: FlyteFile["html"]  # noqa: F821
    model_state: PythonPickledFile
    summary: TrainingSummary
    training_report: FlyteFile["html"]  # noqa: F821
    logs: FlyteDirectory


@task(**small_resources())
@platform_errors(platform)
def list_trials(sweep: Sweep, hp: Hyperparameters, options: RunOptions) -> list[Hyperparameters]:
    """The hyperparameters of each trial, all checked before anything is downloaded or spawned."""
    trials = trials_of(sweep, hp)
    check_rungs(sweep, trials)
    if is_local():
        for trial in trials:
            choose_world(trial.backend, options.nproc, trial.batch_size)
    return trials


@task(
    cache=Cache(policies=[TRAINING_CODE, TRIAL_CODE], ignored_inputs=("options",), serialize=True),
    retries=2,
    **training_resources(TRAINING_CODE),
)
def train_trial(
    hp: Hyperparameters, held_out: PreparedDataset, options: RunOptions, checkpoint: str = ""
) -> TrialResult:
    """Trains without the held-out images and measures on them; for those that fail see as_result.

    checkpoint: to continue from. If it is gone, training starts over, with the same result.
    """
    started, storage = time.time(), FlyteContextManager.current_context().file_access
    init = FlyteFile(checkpoint) if checkpoint and storage.exists(checkpoint) else None
    try:
        outputs = image_training.run(hp, options, held_out, init)
    except (RankError, TaskError) as error:
        return as_result(hp, error, time.time() - started)
    summary, report = outputs.summary, outputs.report.path
    final = str(Path(outputs.logs.path, "final-checkpoint")) if hp.stop_after else ""
    if not is_local():  # a map task shows no Deck
        report, final = (path and storage.put_raw_data(path) for path in (report, final))
    diverged = "" if math.isfinite(summary.test_loss) else "diverged: the loss on the held-out images is not finite"
    return TrialResult(hp, summary.accuracy, summary.test_samples, summary.total_seconds, report, diverged, final)


def as_result(hp: Hyperparameters, error: RankError | TaskError, seconds: float) -> TrialResult:
    """The result of a trial whose loss is not finite. Raises any other error: the result would be cached, but not all
    failures, such as a full disk or GPU memory, follow from the hyperparameters."""
    if error.failure.cause != NonFiniteError.__name__:
        raise error
    return failed(hp, error.failure, seconds)


def failed(hp: Hyperparameters, failure: Failure, seconds: float = 0.0) -> TrialResult:
    reason = f"{failure.cause}: {failure.message}"
    say(f"This trial failed, the sweep continues: {reason}")
    return TrialResult(hp, seconds=seconds, failure=reason)


class Entrants(NamedTuple):
    """The trials of a rung, and the checkpoints that they continue from."""

    trials: list[Hyperparameters]
    checkpoints: list[str]


@task(**small_resources())
@platform_errors(platform)
def next_rung(sweep: Sweep, trials: list[Hyperparameters], rungs: Rungs) -> Entrants:
    """The trials of the rung after these."""
    _, hps, checkpoints = zip(*entrants(sweep, trials, rungs), strict=True)
    return Entrants(list(hps), list(checkpoints))


@dynamic(**dynamic_resources())
def run_trials(sweep: Sweep, trials: list[Hyperparameters], name: str, options: RunOptions) -> Rungs:
    """Holds out a validation split of the named dataset and runs each trial; None if its pod has failed permanently."""
    held_out = hold_out_validation(data=prepare_dataset(name=name))
    trials = [replace(hp, dataset=name) for hp in trials]
    if is_local():
        return run_locally(sweep, trials, held_out, options)
    each = partial(train_trial, held_out=held_out, options=options)
    # With a ratio of 1, a single pod that fails permanently would fail the map task; Flyte requires more than 0
    run_all = map_task(each, concurrency=sweep.concurrency, min_success_ratio=1e-3)
    first = entrants(sweep, trials, [])
    rungs = [run_all(hp=[entrant.hp for entrant in first], checkpoint=[entrant.checkpoint for entrant in first])]
    for _ in rungs_of(sweep, trials)[1:]:
        survivors = next_rung(sweep=sweep, trials=trials, rungs=rungs)
        rungs.append(run_all(hp=survivors.trials, checkpoint=survivors.checkpoints))
    return rungs


def run_locally(sweep: Sweep, trials: list[Hyperparameters], held_out: Any, options: RunOptions) -> Rungs:
    """Runs one trial after another, each cached, so that an interrupted sweep resumes: flytekit's local map task caches
    either all or none."""
    rungs: Rungs = []
    for _ in rungs_of(sweep, trials):
        rungs.append([])
        for number, hp, checkpoint in entrants(sweep, trials, rungs[:-1]):
            until = f", to epoch {hp.last_epoch} of {hp.epochs}" if sweep.reduction_factor > 1 else ""
            values = chosen(hp, sweep.values)
            say(f"\nTrial {number} of {len(trials)}: {values}{until}; tested on held-out training images")
            try:
                result = train_trial(hp=hp, held_out=held_out, options=options, checkpoint=checkpoint)
                rungs[-1].append(value_of(result))
            except RankError as error:  # not cached, because it may succeed next time
                rungs[-1].append(failed(hp, error.failure))
    return rungs


def value_of(result: Any) -> TrialResult:
    """A task's output in a local run, where flytekit keeps outputs as literals."""
    value: TrialResult = TypeEngine.to_python_value(FlyteContextManager.current_context(), result.val, TrialResult)
    return value


@task(enable_deck=True, deck_fields=(), **small_resources())
@platform_errors(platform)
def compare(sweep: Sweep, trials: list[Hyperparameters], name: str, rungs: Rungs) -> Comparison:
    """Ranks the trials by their validation accuracy; raises ReportedError if none has one."""
    names, results = list(sweep.values), standings(sweep, trials, rungs)
    ranking = ranked(results)
    number, best = ranking[0]
    if best.failure:
        raise all_failed(sweep, results)
    cut = saving(sweep, trials, results)
    with run_folder(platform, f"sweep-{name}") as folder:
        write_table(ranking, names, folder / "trials.csv")
        report = output_page(folder, f"Sweep on {name}", comparison(ranking, names, cut))
    where = f"\nTrials:   {folder / 'trials.csv'}\nReport:   {report.path}" if is_local() else ""
    trained = f"\nTrained:  {cut}" if cut else ""
    say_last(f"\nBest:     {chosen(best.hp, names)}: {best.accuracy:.2%} validation accuracy{trained}{where}\n")
    hp = replace(best.hp, stop_after=trials[number - 1].stop_after)
    return Comparison(hp, output_file(folder / "trials.csv"), report)


@workflow
def sweep_wf(
    sweep: Sweep = Sweep(),
    hp: Hyperparameters = Hyperparameters(),
    options: RunOptions = RunOptions(),
) -> SweepOutputs:
    """Compares hyperparameters on one in twelve training images, held out, and trains with the best on all.

    Args:
        sweep: which hyperparameters to try, and which values of them.
        hp: the other hyperparameters of every trial.
        options: how to run each training; ignored by the cache.
    """
    trials = list_trials(sweep=sweep, hp=hp, options=options)
    name = resolve_dataset(hp=hp, options=options)
    trials >> name  # checks the trials before anything is downloaded
    rungs = run_trials(sweep=sweep, trials=trials, name=name, options=options)
    compared = compare(sweep=sweep, trials=trials, name=name, rungs=rungs)
    final = pytorch_mnist_task(hp=compared.best, data=prepare_dataset(name=name), options=options, init=None)
    return SweepOutputs(
        compared.best, compared.table, compared.report, final.model_state, final.summary, final.report, final.logs
    )


if __name__ == "__main__":
    print(sweep_wf())
