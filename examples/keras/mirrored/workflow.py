"""A Keras network under tf.distribute: one process with a replica per device, or two workers that meet on loopback.

pyflyte run mirrored/workflow.py mirrored_wf --hp '{"strategy": "multi_worker"}'
"""

import hashlib
from typing import NamedTuple

from flytekit import task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.attempt.run import training_run
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.outputs import output_file, output_page
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte, ship
from flyte_ddp.flyte1.resources import training_resources
from mirrored.page import page
from mirrored.processes import CODE, train
from mirrored.settings import Hyperparameters

set_up_pyflyte()
ship(CODE.files)


class Outputs(NamedTuple):
    """The outputs of a training.

    Attributes:
        epoch_accuracies: the accuracy on the test samples after each epoch, from 0 to 1.
        model: the network, for keras.models.load_model; maps features (N, 30) as measured to probabilities (N, 2).
        report: an HTML page in one file.
    """

    epoch_accuracies: list[float]
    model: FlyteFile["keras"]  # noqa: F821
    report: FlyteFile["html"]  # noqa: F821


@task(retries=2, enable_deck=True, deck_fields=(), **training_resources())
def train_mirrored(hp: Hyperparameters) -> Outputs:
    """Train the network; a retry resumes from the last attempt's checkpoint."""
    key = hashlib.sha256(repr((hp, CODE.version)).encode()).hexdigest()[:16]
    with training_run(platform, "mirrored", key, resume=True) as run:
        model = run.folder / "model.keras"
        result = train(hp, model, run.store.path, run.store)
        report = output_page(run.folder, *page(hp, result))
        return Outputs([epoch.test["accuracy"] for epoch in result.epochs], output_file(model), report)


@workflow
def mirrored_wf(hp: Hyperparameters = Hyperparameters()) -> Outputs:
    """Train a Keras network with two hidden layers on several devices.

    Args:
        hp: the network, its training and its devices, in part or whole; the rest takes its defaults.
    """
    return train_mirrored(hp=hp)


if __name__ == "__main__":
    print(mirrored_wf())
