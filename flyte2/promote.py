"""A training under Flyte 2 whose model is promoted if it is better than the promoted one; nightly, once activated.

With --artifact mnist a promoted model is an artifact, too, which starts triggers such as that of flyte2/inference.py.

flyte run --local flyte2/promote.py main --place models
flyte run --local flyte2/promote.py roll_back --place models --name 20261122-030412-1f2e3d4c
"""

import flyte
from flyte.io import Dir, File

from flyte2.mnist import preparation, prepare, train, training
from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte2.environment import workflow_environment
from flyte_ddp.flyte2.prepare import resolve_dataset
from flyte_ddp.flyte2.train import image_training
from flyte_ddp.promote.flyte2 import (
    PromotionOutputs,
    RollBackOutputs,
    make_artifact,
    promote_images,
    promotion_arguments,
    resolve_place,
    roll_back_to,
)
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.promote.promotion import PromotionSummary
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

promotion = image_training.environment("promotion", most_gpus=1)
publication = workflow_environment("publication")
workflow = workflow_environment("promote", preparation, training, promotion, publication)
roll_back_environment = workflow_environment("roll_back", secrets=["MLFLOW_TRACKING_URI"])

# Not active when deployed: flyte update trigger nightly promote.main --activate
nightly = flyte.Trigger(
    "nightly",
    flyte.Cron("0 3 * * *"),  # UTC
    inputs={"hp": Hyperparameters(dataset="mnist")},
    overwrite_cache=True,
    auto_activate=False,
)


@promotion.task(**promotion_arguments())
async def promote(
    model_state: File, data: Dir, hp: Hyperparameters, place: str, options: PromotionOptions
) -> PromotionOutputs:
    """Measure the candidate and the promoted model on the same test images, and promote the better one."""
    return promote_images(model_state, data, hp, place, options)


@publication.task(produces_artifacts=True)
async def publish(model_state: File, summary: PromotionSummary, artifact: str) -> File:
    """Return the promoted model as a new version of the artifact."""
    published: File = make_artifact(model_state, summary, artifact)
    return published


@workflow.task(triggers=nightly)
async def main(
    place: str = registration().promote_to,
    hp: Hyperparameters = Hyperparameters(),
    promotion: PromotionOptions = PromotionOptions(),
    options: RunOptions = RunOptions(),
    artifact: str = "",
) -> PromotionOutputs:
    """Train a candidate, and promote it if it is better than the promoted model.

    Args:
        place: the folder, or URL of the cluster's storage, that models are promoted to.
        hp: the settings that determine the result of the training.
        promotion: by which measure, and by how much, the candidate must be better.
        options: how to train.
        artifact: the artifact that a promoted candidate becomes a new version of; empty for none.
    """
    root = resolve_place(place)
    data = await prepare(resolve_dataset(hp, options))
    trained = await train(hp, data, options, None)
    outputs = await promote(trained.model_state, data, hp, root, promotion)
    if artifact and outputs.promoted:
        await publish(outputs.model_state, outputs.summary, artifact)
    return outputs


@roll_back_environment.task(report=True)
async def roll_back(place: str = registration().promote_to, name: str = "") -> RollBackOutputs:
    """Promote an earlier version again; without a name only show the history and the versions.

    Args:
        place: the folder, or URL of the cluster's storage, with the promoted models.
        name: the version's name.
    """
    return roll_back_to(place, name)
