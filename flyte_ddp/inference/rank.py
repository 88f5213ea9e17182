"""Batch prediction in a process of its own, which checks a file of weights, or predicts a shard."""

from pathlib import Path

import numpy as np
import torch

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.data.image_files import MODES, decode, reason
from flyte_ddp.data.prepared import prepared
from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.engine.batches.batches import EvaluationBatches
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.errors import InputError
from flyte_ddp.inference.shards import Row, ShardJob, write_rows
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.model_files.weights import load_weights
from flyte_ddp.recipes.images import Normaliser
from flyte_ddp.recipes.models import MODELS, load_model
from flyte_ddp.whole_files import writing_to

REMEDY = "use that of a training, and set the model and dataset of that training in options"


def check_model(environment: Environment, link: Link, argument: tuple[str, str, str]) -> None:
    """Raise InputError unless a file has the weights of a network for a prepared dataset's images.

    A process of its own runs the function, by run_alone.

    Args:
        environment: not used.
        link: not used.
        argument: the path of the file, the network's name in MODELS, and the dataset's folder.
    """
    path, name, data = argument
    description = prepared.read_description(data)
    load_weights(MODELS[name](description.image_shape, len(description.classes)), path, remedy=REMEDY)


@torch.inference_mode()
def predict_images(environment: Environment, link: Link, job: ShardJob) -> None:
    """Predict each image of a shard in float32, and write a CSV file with a row for each image to job.output.

    A process of its own runs the function, by run_alone, on a CPU or a GPU. An image that could not be read gets the
    reason in its row, and no prediction.

    Args:
        environment: this process, with its device.
        link: tells the parent process after each image file and each batch that this process is alive.
        job: the shard. All of its images are in memory at once.

    Raises:
        InputError: A score is not finite, images or weights cannot be used, or the file cannot be written.
    """
    torch.set_num_threads(environment.threads)
    settle_arithmetic()
    device = torch.device(environment.world.device)
    description = prepared.read_description(job.data)
    images, rows = read_images(job, description, link)
    model = load_model(job.model_path, job.options.model, description.image_shape, len(description.classes))
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    normalise = Normaliser(description.mean, description.std, device)
    predictions: list[tuple[float, int]] = []
    for batch in EvaluationBatches(Resident(images, device), job.options.batch_size, rank=0, world_size=1):
        scores, guesses = model(normalise(batch.tree)).softmax(1).max(1)
        if not scores.isfinite().all():  # max() of NaN would be the first class
            raise InputError("model_state must give finite scores, got NaN: it has diverged; use another")
        predictions += zip(scores.tolist(), guesses.tolist(), strict=True)
        link.heartbeat()
    predicted = [
        row if row.error else row._replace(prediction=description.classes[guess], score=f"{score:.6f}")
        for row, (score, guess) in zip(rows, predictions, strict=True)
    ]
    with writing_to(Path(job.output).parent, "DDP_RUNS_DIR"):
        write_rows(Path(job.output), predicted)


def read_images(job: ShardJob, description: DatasetDescription, link: Link) -> tuple[np.ndarray, list[Row]]:
    """Return the shard's images (n, C, H, W) uint8, and a row for each image, without prediction and score.

    The images are the files job.files or, if there are none, a part of the dataset's split. A file's label is the class
    that its folder is named after, by name or number, else "". The image of a file that cannot be read is all zeros,
    and its row has the reason. After each file, the link tells the parent process that this process is alive.

    Raises:
        InputError: the images are files, and the dataset's images have neither 1 nor 3 channels.
    """
    if not job.files:
        images, labels = prepared.open_split(job.data, job.options.split)
        chosen = range(job.shard.first, job.shard.last)
        known = [Row(str(index), description.classes[labels[index]], "", "", "") for index in chosen]
        return images[job.shard.first : job.shard.last], known
    if description.image_shape[0] not in MODES:
        raise InputError(
            f"a folder's images can have 1 or 3 channels, the dataset's have {description.image_shape[0]}: leave "
            "folder out"
        )
    # A folder may be named after a class's number or its name; the name wins
    labelled = {str(number): name for number, name in enumerate(description.classes)}
    labelled.update((name, name) for name in description.classes)
    images = np.zeros((len(job.files), *description.image_shape), np.uint8)
    rows = []
    for image, (name, path) in zip(images, job.files, strict=True):
        problem = ""
        try:
            image[:] = decode(Path(path), description.image_shape)
        except Exception as error:  # Pillow's decoders raise a dozen types for a damaged file
            problem = reason(error)
        rows.append(Row(name, labelled.get(Path(name).parent.name, ""), "", "", problem))
        link.heartbeat()
    return images, rows
