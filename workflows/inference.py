"""Batch prediction with a trained model, over a dataset or a folder of image files; and how fast it can be.

pyflyte run workflows/inference.py inference_wf --model_state model.pt --options '{"dataset": "mnist"}'
"""

from functools import partial
from typing import List, Optional

from flytekit import map_task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from workflows.mnist import pytorch_training_wf
from workflows.tasks.gather import InferenceOutputs, gather_shards
from workflows.tasks.inference import check_inputs, plan_shards, predict_shard
from workflows.tasks.inputs import explain_unreadable_settings
from workflows.tasks.prepare import prepare_dataset
from workflows.tasks.resources import registration
from workflows.tasks.timing import TimingOutputs, check_timing, time_inference
from workflows.training.measurement import TimingOptions
from workflows.training.shards import InferenceOptions

explain_unreadable_settings()


@workflow
def inference_wf(
    model_state: FlyteFile,
    folder: Optional[FlyteDirectory] = None,
    options: InferenceOptions = InferenceOptions(),  # noqa: B008
) -> InferenceOutputs:
    """Predicts in shards, each of which is retried and remembered by itself.

    Args:
        model_state: the weights, as a training gives them.
        folder: of image files, which are brought to the size and channels of the dataset; a sub-folder may bear a
            class's name or number. Without one, the images are those of a split of the dataset.
        options: the network, the dataset that it was trained on, and how to predict.
    """
    data = prepare_dataset(name=check_inputs(model_state=model_state, folder=folder, options=options))
    shards = plan_shards(model_state=model_state, data=data, folder=folder, options=options)
    fixed = partial(predict_shard, model_state=model_state, data=data, folder=folder, options=options)
    parts = map_task(fixed, concurrency=registration().concurrency or None)(shard=shards)
    return gather_shards(parts=parts, data=data, folder=folder, options=options)


@workflow
def inference_timing_wf(
    batch_sizes: List[int] = [1, 8, 32, 128, 512],  # noqa: B006
    options: TimingOptions = TimingOptions(),  # noqa: B008
) -> TimingOutputs:
    """Times one device against nn.DataParallel against one process per device.

    Args:
        batch_sizes: images that each device gets at a time.
        options: what to time, and how often.
    """
    data = prepare_dataset(name=check_timing(batch_sizes=batch_sizes, options=options))
    return time_inference(batch_sizes=batch_sizes, data=data, options=options)


if __name__ == "__main__":
    print(inference_wf(model_state=pytorch_training_wf().model_state))
