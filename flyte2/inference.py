"""Predictions of a trained image classifier under Flyte 2: a map over shards, each retried and cached on its own.

Once the trigger is activated, each model that flyte2/promote.py publishes as the artifact mnist predicts, too.

flyte run --local flyte2/inference.py main --model_state model.pt --shards 2
"""

from functools import partial

import flyte
from flyte.io import Dir, File

from flyte2.mnist import preparation, prepare
from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte2.data import by_content
from flyte_ddp.flyte2.environment import workflow_environment
from flyte_ddp.flyte2.prepare import classifier_settings, shard_numbers
from flyte_ddp.flyte2.train import image_training
from flyte_ddp.recipes.hyperparameters import Hyperparameters

prediction = image_training.environment("inference_shards", most_gpus=1)
workflow = workflow_environment("inference", preparation, prediction)

# Not active when deployed: flyte update trigger on_promotion inference.main --activate
on_promotion = flyte.Trigger(
    "on_promotion",
    flyte.OnArtifact("mnist"),
    inputs={"model_state": flyte.TriggeredArtifact},
    auto_activate=False,
)


@prediction.task(**image_training.arguments(ignored=()))
async def predict(shard: int, shards: int, model_state: File, hp: Hyperparameters, data: Dir, split: str) -> File:
    """Return the log-probabilities (n, classes) of a shard, as an .npy file."""
    return image_training.predict(model_state, hp, shard, shards, data, split)


@workflow.task(triggers=on_promotion)
async def main(model_state: File, shards: int = 4, split: str = "test") -> list[File]:
    """Predict a split of the dataset that the network was trained on.

    Args:
        model_state: the output of a training, whose metadata say what network and dataset it is of.
        shards: how many parts to predict, each on its own.
        split: "train" or "test".

    Returns:
        The shards' files, in their order.
    """
    numbers = shard_numbers(shards)
    hp = classifier_settings(model_state)
    weights = by_content(model_state)
    each = partial(predict, shards=shards, model_state=weights, hp=hp, data=await prepare(hp.dataset), split=split)
    concurrency = registration().concurrency
    # With return_exceptions, which is the default, a failure would stand among the files
    parts = flyte.map.aio(each, numbers, concurrency=concurrency, return_exceptions=False)
    return [part async for part in parts]  # type: ignore[misc]
