"""Batch prediction with a trained model, for a dataset or a folder of image files.

pyflyte run workflows/inference.py inference_wf --model_state model.pt
"""

from functools import partial

from flytekit import dynamic, map_task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile

from flyte_ddp.attempt.registration import registration
from flyte_ddp.flyte1.prepare import PreparedDataset, prepare_dataset
from flyte_ddp.flyte1.pyflyte import set_up_pyflyte
from flyte_ddp.flyte1.resources import dynamic_resources
from flyte_ddp.inference.gather import InferenceOutputs, gather_shards
from flyte_ddp.inference.shards import InferenceOptions
from flyte_ddp.inference.task import plan_shards, predict_shard, resolve_inputs
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from workflows.mnist import pytorch_training_wf

set_up_pyflyte()


@dynamic(**dynamic_resources())
def given_or_trained(
    model_state: PythonPickledFile | None, data: PreparedDataset, options: InferenceOptions
) -> PythonPickledFile:
    """Return the given weights, else those of a training by the defaults, which starts once the data are prepared."""
    if model_state is not None:
        return model_state
    hp = Hyperparameters(dataset=options.dataset, model=options.model)
    return pytorch_training_wf(hp=hp, options=RunOptions()).model_state


@workflow
def inference_wf(
    model_state: PythonPickledFile | None = None,
    folder: FlyteDirectory | None = None,
    options: InferenceOptions = InferenceOptions(),
) -> InferenceOutputs:
    """Predict in shards, each retried and cached on its own.

    Args:
        model_state: the output of a training; without it, a model is trained first.
        folder: a folder of image files, which are converted to the size and channels of the dataset; a sub-folder may
            have the name or number of a class. Without it, the images are those of a split of the dataset.
        options: the network, the dataset that it was trained on, and how to predict; the first two may be left out if
            the weights have metadata, as training writes them.
    """
    checked = resolve_inputs(model_state=model_state, folder=folder, options=options)
    data = prepare_dataset(name=checked.dataset)
    weights = given_or_trained(model_state=model_state, data=data, options=checked.options)
    plan = plan_shards(model_state=weights, data=data, folder=folder, options=checked.options)
    images = {"data": data, "folder": folder, "listing": plan.listing, "options": checked.options}
    fixed = partial(predict_shard, model_state=weights, **images)
    parts = map_task(fixed, concurrency=registration().concurrency or None)(shard=plan.shards)
    return gather_shards(parts=parts, **images)


if __name__ == "__main__":
    print(inference_wf())
