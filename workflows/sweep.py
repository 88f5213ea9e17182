"""Hyperparameters tried out on training images that are held out; the best then train on all of them.

pyflyte run workflows/sweep.py sweep_wf --sweep '{"values": {"learning_rate": [0.05, 0.1, 0.2]}}' --hp '{"epochs": 1}'
"""

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any, List, NamedTuple, Optional

from flytekit import Cache, FlyteContextManager, dynamic, map_task, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.errors import RecoverableError, ReportedError
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.launch.failures import RankFailed
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import say
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.held_out import hold_out_validation
from flyte_ddp.sweep.page import chosen, comparison, failures, ranked, write_table
from flyte_ddp.sweep.search import Sweep, TrialResult, trials_of
from flyte_ddp.tasks.execution import TaskFailed, is_local, run_dir
from flyte_ddp.tasks.outputs import output_file, output_page
from flyte_ddp.tasks.prepare import PreparedDataset, prepare_dataset, resolve_dataset
from flyte_ddp.tasks.pyflyte import set_up_pyflyte
from flyte_ddp.tasks.resources import dynamic_resources, small_resources, training_resources
from flyte_ddp.tasks.summaries import TrainingSummary
from flyte_ddp.tasks.train import train
from flyte_ddp.tasks.versions import TRAINING_SOURCES, CodeVersion
from workflows.mnist import pytorch_mnist_task

set_up_pyflyte()

TRIAL_CODE = CodeVersion((*TRAINING_SOURCES, "flyte_ddp/sweep/search.py", "workflows/sweep.py"), ("torch",))
NO_RESULT = "no result even after Flyte's retries: the log of its pod says why"


class Comparison(NamedTuple):
    """The trials side by side.

    Attributes:
        best: the hyperparameters of the highest validation accuracy.
        table: of all trials, best first.
        report: a page to look at, in one file.
    """

    best: Hyperparameters
    table: FlyteFile["csv"]  # noqa: F821
    report: FlyteFile["html"]  # noqa: F821


class SweepOutputs(NamedTuple):
    """What a sweep gives back: a Comparison, and what training with the best on all training images gave.

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
def list_trials(sweep: Sweep, hp: Hyperparameters, options: RunOptions) -> List[Hyperparameters]:
    """The hyperparameters of each trial, all of them checked before anything is downloaded or spawned."""
    trials = trials_of(sweep, hp)
    if is_local():
        for trial in trials:
            choose_world(trial.backend, options.nproc, trial.batch_size)
    return trials


@task(
    cache=Cache(policies=TRIAL_CODE, ignored_inputs=("options",), serialize=True),
    retries=2,
    **training_resources(TRIAL_CODE),
)
def train_trial(hp: Hyperparameters, held_out: PreparedDataset, options: RunOptions) -> TrialResult:
    """Trains on what hold_out_validation has left and measures on the rest; a failure for good is a result too."""
    started = time.time()
    try:
        outputs = train(hp, held_out, options)
    except (RankFailed, TaskFailed) as error:
        cause = error.__context__ if isinstance(error, TaskFailed) else error  # as Flyte will see it
        if not isinstance(cause, RankFailed) or isinstance(cause, RecoverableError):
            raise
        return failed(hp, cause, time.time() - started)
    summary, report = outputs.summary, outputs.report.path
    if not is_local():  # a map task shows no Deck
        report = FlyteContextManager.current_context().file_access.put_raw_data(report)
    diverged = "" if math.isfinite(summary.test_loss) else "diverged: the loss on the held-out images is not finite"
    return TrialResult(hp, summary.accuracy, summary.test_samples, summary.total_seconds, report, diverged)


def failed(hp: Hyperparameters, error: RankFailed, seconds: float = 0.0) -> TrialResult:
    reason = f"{error.failure.cause}: {error.failure.message}"
    say(f"This trial failed, the sweep continues: {reason}")
    return TrialResult(hp, seconds=seconds, failure=reason)


@dynamic(**dynamic_resources())
def run_trials(
    sweep: Sweep, trials: List[Hyperparameters], name: str, options: RunOptions
) -> List[Optional[TrialResult]]:
    """Holds out a validation split of the named dataset and runs each trial; None where its pod has failed for good."""
    held_out = hold_out_validation(data=prepare_dataset(name=name))
    trials = [replace(hp, dataset=name) for hp in trials]
    if is_local():
        return run_locally(sweep, trials, held_out, options)
    # Without a ratio below 1, one pod that fails for good would be the end of all; above 0, the least that Flyte takes
    each = partial(train_trial, held_out=held_out, options=options)
    return map_task(each, concurrency=sweep.concurrency, min_success_ratio=1e-3)(hp=trials)


def run_locally(sweep: Sweep, trials: List[Hyperparameters], held_out: Any, options: RunOptions) -> Any:
    """One trial after the other, each cached, so that an interrupted sweep resumes: flytekit's local
    map task caches all of them together or none."""
    results: List[Any] = []
    for number, hp in enumerate(trials, 1):
        say(f"\nTrial {number} of {len(trials)}: {chosen(hp, sweep.values)}; tested on held-out training images")
        try:
            results.append(train_trial(hp=hp, held_out=held_out, options=options))
        except RankFailed as error:  # that may go well the next time, and so isn't cached
            results.append(failed(hp, error))
    return results


@task(enable_deck=True, deck_fields=(), **small_resources())
def compare(sweep: Sweep, trials: List[Hyperparameters], name: str, results: List[Optional[TrialResult]]) -> Comparison:
    """Ranks the trials by their validation accuracy; raises ReportedError if none has one."""
    names = list(sweep.values)
    ranking = ranked([one or TrialResult(hp, failure=NO_RESULT) for hp, one in zip(trials, results, strict=True)])
    best = ranking[0].result
    if best.failure:
        raise ReportedError("\n".join(["Every trial of the sweep failed:", *failures(ranking, names)]))
    with run_dir(f"sweep-{name}") as folder:
        write_table(ranking, names, folder / "trials.csv")
        report = output_page(folder, f"Sweep on {name}", comparison(ranking, names))
    where = f"\nTrials:   {folder / 'trials.csv'}\nReport:   {report.path}" if is_local() else ""
    say(f"\nBest:     {chosen(best.hp, names)}: {best.accuracy:.2%} validation accuracy{where}\n")
    return Comparison(best.hp, output_file(folder / "trials.csv"), report)


@workflow
def sweep_wf(
    sweep: Sweep = Sweep(),
    hp: Hyperparameters = Hyperparameters(),
    options: RunOptions = RunOptions(),
) -> SweepOutputs:
    """Tries hyperparameters out on one training image of twelve, held out, and trains with the best on all.

    Args:
        sweep: which hyperparameters to try, and which values of them.
        hp: the other hyperparameters of every trial.
        options: how to run each training; the cache does not look at this.
    """
    trials = list_trials(sweep=sweep, hp=hp, options=options)
    name = resolve_dataset(hp=hp, options=options)
    trials >> name  # nothing is downloaded for what cannot be tried
    results = run_trials(sweep=sweep, trials=trials, name=name, options=options)
    compared = compare(sweep=sweep, trials=trials, name=name, results=results)
    final = pytorch_mnist_task(hp=compared.best, data=prepare_dataset(name=name), options=options, init=None)
    return SweepOutputs(
        compared.best, compared.table, compared.report, final.model_state, final.summary, final.report, final.logs
    )


if __name__ == "__main__":
    print(sweep_wf())
