"""A comparison of hyperparameters on held-out training images under Flyte 2, and a training with the best on all.

flyte run --local flyte2/sweep.py main --sweep '{"values": {"learning_rate": [0.05, 0.1, 0.2]}}' --hp '{"epochs": 1}'
"""

from dataclasses import dataclass, replace

from flyte.io import Dir, File

from flyte2.mnist import preparation, prepare, train, training
from flyte_ddp.code.code_version import code_version
from flyte_ddp.flyte2.environment import cached, workflow_environment
from flyte_ddp.flyte2.prepare import resolve_dataset
from flyte_ddp.flyte2.train import TrainingOutputs, image_training
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.flyte2 import compare, list_trials, run_rungs, try_out
from flyte_ddp.sweep.halving import VALIDATION_FRACTION, Entrant, TrialResult
from flyte_ddp.sweep.search import Sweep

trials = image_training.environment("sweep_trials")
code = f"{image_training.code.version} {code_version('flyte_ddp.sweep.flyte2')}"
workflow = workflow_environment("sweep", preparation, training, trials)


@dataclass(frozen=True)
class SweepOutputs:
    """The outputs of a sweep.

    Attributes:
        best: the hyperparameters with the highest validation accuracy.
        table: all trials, best first.
        report: an HTML page in a single file.
        training: the outputs of training with the best on all training images.
    """

    best: Hyperparameters
    table: File
    report: File
    training: TrainingOutputs


@trials.task(**image_training.arguments(cache=cached(code, ["options"], ["torch"])))
async def train_trial(entrant: Entrant, data: Dir, options: RunOptions) -> TrialResult:
    """Train without the held-out images, and measure on these."""
    return try_out(entrant, data, options)


@workflow.task(report=True)
async def main(
    sweep: Sweep = Sweep(), hp: Hyperparameters = Hyperparameters(), options: RunOptions = RunOptions()
) -> SweepOutputs:
    """Compare hyperparameters on one in twelve training images, held out, and train with the best on all.

    Args:
        sweep: which hyperparameters to try, and which values of them.
        hp: the other hyperparameters of every trial.
        options: how to run each training; the cache ignores them.
    """
    listed = list_trials(sweep, hp, options)
    name = resolve_dataset(hp, options)
    data = await prepare(name)
    fraction = hp.validation_fraction or VALIDATION_FRACTION
    validated = [replace(trial, dataset=name, validation_fraction=fraction) for trial in listed]
    rungs = await run_rungs(sweep, validated, lambda entrant: train_trial(entrant, data, options))
    found = compare(sweep, validated, rungs, name)
    best = replace(found.best, validation_fraction=hp.validation_fraction)
    return SweepOutputs(best, found.table, found.report, await train(best, data, options, None))
