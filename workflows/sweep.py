"""A comparison of hyperparameters on held-out training images, and a training with the best on all training images.

pyflyte run workflows/sweep.py sweep_wf --sweep '{"values": {"learning_rate": [0.05, 0.1, 0.2]}}' --hp '{"epochs": 1}'
"""

from dataclasses import replace
from typing import Any, NamedTuple

from flytekit import Cache, dynamic, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.summaries import TrainingSummary
from flyte_ddp.code.code_version import code_version
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.flyte1.prepare import PreparedDataset, prepare_dataset, resolve_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import dynamic_resources, small_resources
from flyte_ddp.flyte1.train import TRAINING_CODE, image_training, training_arguments
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.halving import VALIDATION_FRACTION, Entrant, TrialResult, classifier_trials
from flyte_ddp.sweep.search import Sweep
from flyte_ddp.sweep.task import SweepComparison, run_sweep, try_out
from workflows.mnist import pytorch_mnist_task

set_up_pyflyte()

TRIAL_CODE = CodeVersion(code_version("workflows.sweep"), ())


class SweepOutputs(NamedTuple):
    """The outputs of a sweep: a SweepComparison, and the outputs of training with the best on all training images.

    Attributes:
        model_state, summary, training_report, logs: see flyte_ddp.flyte1.train.TrainingOutputs.
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
    """Return the hyperparameters of each trial, all checked before anything is downloaded or spawned."""
    return classifier_trials(platform, sweep, hp, options)


@task(
    **training_arguments(
        cache=Cache(policies=[TRAINING_CODE, TRIAL_CODE], ignored_inputs=("options",), serialize=True),
        enable_deck=False,  # a map task shows none
    )
)
def train_trial(entrant: Entrant, data: PreparedDataset, options: RunOptions) -> TrialResult:
    return try_out(image_training.run, Hyperparameters, entrant, data=data, options=options)


@dynamic(**dynamic_resources())
def run_trials(sweep: Sweep, trials: list[Hyperparameters], name: str, options: RunOptions) -> SweepComparison:
    """Run each trial on the named dataset, with a validation split of its training images, and compare them."""
    validated = [
        replace(hp, dataset=name, validation_fraction=hp.validation_fraction or VALIDATION_FRACTION) for hp in trials
    ]
    found: Any = run_sweep(sweep, validated, train_trial, name, data=prepare_dataset(name=name), options=options)
    return found


@task(**small_resources())
@platform_errors(platform)
def best_hyperparameters(best: str, hp: Hyperparameters) -> Hyperparameters:
    """Return the best hyperparameters, for a training on all training images, unless hp holds some out.

    Args:
        best: the hyperparameters of the best trial, as JSON.
        hp: the hyperparameters that the sweep was given.
    """
    return replace(Hyperparameters.from_json(best), validation_fraction=hp.validation_fraction)


@workflow
def sweep_wf(
    sweep: Sweep = Sweep(),
    hp: Hyperparameters = Hyperparameters(),
    options: RunOptions = RunOptions(),
) -> SweepOutputs:
    """Compare hyperparameters on one in twelve training images, held out, and train with the best on all.

    Args:
        sweep: which hyperparameters to try, and which values of them.
        hp: the other hyperparameters of every trial.
        options: how to run each training; the cache ignores them.
    """
    trials = list_trials(sweep=sweep, hp=hp, options=options)
    name = resolve_dataset(hp=hp, options=options)
    trials >> name  # the trials are checked before anything is downloaded
    compared = run_trials(sweep=sweep, trials=trials, name=name, options=options)
    best = best_hyperparameters(best=compared.best, hp=hp)
    final = pytorch_mnist_task(hp=best, data=prepare_dataset(name=name), options=options, init=None)
    return SweepOutputs(
        best, compared.table, compared.report, final.model_state, final.summary, final.report, final.logs
    )


if __name__ == "__main__":
    print(sweep_wf())
