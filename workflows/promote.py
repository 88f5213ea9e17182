"""The promotion of a model, trained or given, if it is better than the promoted one.

pyflyte run workflows/promote.py promote_wf --place models --promotion '{"margin": 0.001}'
pyflyte run workflows/promote.py roll_back_wf --place models --name 20261122-030412-1f2e3d4c
"""

from flytekit import dynamic, workflow
from flytekit.types.file import PythonPickledFile

from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte1.prepare import prepare_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import dynamic_resources
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.promote.task import PromotionOutputs, RollBackOutputs, check_promotion, promote_images, roll_back
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from workflows.mnist import pytorch_mnist_task

set_up_pyflyte()


@dynamic(**dynamic_resources())
def candidate(
    model_state: PythonPickledFile | None, hp: Hyperparameters, name: str, options: RunOptions
) -> PythonPickledFile:
    """Return the given weights, else those of the same training as in workflows/mnist.py."""
    if model_state is not None:
        return model_state
    data = prepare_dataset(name=name)  # from the cache: Flyte would hash an input, which is not downloaded here
    return pytorch_mnist_task(hp=hp, data=data, options=options, init=None).model_state


@workflow
def promote_wf(
    place: str = registration().promote_to,
    model_state: PythonPickledFile | None = None,
    hp: Hyperparameters = Hyperparameters(),
    promotion: PromotionOptions = PromotionOptions(),
    options: RunOptions = RunOptions(),
) -> PromotionOutputs:
    """Measure the candidate and the promoted model on the same test images, and promote the better one.

    Args:
        place: the folder, or URL of Flyte's storage, that models are promoted to; a local run has a default.
        model_state: the candidate's weights, the output of a training; by default one is trained.
        hp: the settings of the training. For a given model, only those that its file lacks, or that should differ, such
            as the dataset to measure it on.
        promotion: by which measure, and by how much, the candidate must be better.
        options: how to train; the cache ignores them.
    """
    target = check_promotion(place=place, model_state=model_state, hp=hp, options=options)
    data = prepare_dataset(name=target.dataset)
    weights = candidate(model_state=model_state, hp=hp, name=target.dataset, options=options)
    data >> weights
    return promote_images(model_state=weights, data=data, hp=target.hp, place=target.place, options=promotion)


@workflow
def roll_back_wf(place: str = registration().promote_to, name: str = "") -> RollBackOutputs:
    """Promote an earlier version again.

    Args:
        place: the folder, or URL of Flyte's storage, that models are promoted to; a local run has a default.
        name: the version's name; without it, the history is shown and nothing changes.
    """
    return roll_back(place=place, name=name)


if __name__ == "__main__":
    print(promote_wf())
