"""The time of a network's inference over batch sizes.

PYTHONPATH=. pyflyte run examples/measure/inference.py inference_wf --network resnet9_small --batch_sizes '[1, 32, 512]'
"""

from typing import NamedTuple

import numpy as np
import torch
from flytekit import task, workflow
from flytekit.types.file import FlyteFile
from matplotlib.figure import Figure
from torch.utils.benchmark import Timer

from flyte_ddp import load_model, read_metadata
from flyte_ddp.flyte1.resources import training_resources
from flyte_ddp.recipes.models import build_model
from measure.page import show


class InferenceOutputs(NamedTuple):
    """The outputs: the median seconds of a batch, by batch size, and a page with the figure."""

    seconds: dict[str, float]
    report: FlyteFile


@task(enable_deck=True, deck_fields=(), **training_resources(most_gpus=1))
def time_inference(
    batch_sizes: list[int], network: str, image_shape: list[int], model_state: FlyteFile | None, repeats: int
) -> InferenceOutputs:
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes must be whole numbers from 1, got {batch_sizes}: give some, such as [1, 32]")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if model_state:
        path = model_state.download()
        model, metadata = load_model(path), read_metadata(path)
        image_shape = metadata.facts.get("image_shape", image_shape) if metadata else image_shape
    else:
        model = build_model(network, 0, tuple(image_shape), 10).eval()
    model.to(device)
    timed = {}
    with torch.inference_mode():
        for size in sorted({*batch_sizes}):
            images = torch.rand(size, *image_shape, device=device)
            timer = Timer(
                "model(images)", globals={"model": model, "images": images}, num_threads=torch.get_num_threads()
            )
            timed[size] = np.array([timer.blocked_autorange(min_run_time=0.2).median for _ in range(repeats)])
            print(f"{size} images: {1000 * np.median(timed[size]):.3f} ms")
    medians = {size: float(np.median(times)) for size, times in timed.items()}
    what = f"{type(model).__name__}, float32, images {image_shape} on the {device.type}; median and range of {repeats}"
    return InferenceOutputs(
        {str(size): value for size, value in medians.items()}, show("Inference over batch sizes", what, draw(timed))
    )


def draw(timed: dict[int, np.ndarray]) -> Figure:
    """Draw milliseconds of a batch, and images per second, over batch sizes. timed: seconds, by batch size."""
    figure = Figure(figsize=(10, 4))
    of_batch, of_images = figure.subplots(1, 2)
    curves = {
        "milliseconds of a batch": (of_batch, {size: 1000 * times for size, times in timed.items()}),
        "images per second": (of_images, {size: size / times for size, times in timed.items()}),
    }
    for label, (axes, values) in curves.items():
        low, middle, high = np.array([np.percentile(one, (0, 50, 100)) for one in values.values()]).T
        axes.errorbar([*values], middle, (middle - low, high - middle), marker="o", capsize=3)
        axes.set(xlabel="images in a batch", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks([*values], [str(size) for size in values])
        axes.grid(alpha=0.3)
    return figure


@workflow
def inference_wf(
    batch_sizes: list[int] = [1, 8, 32, 128, 512],
    network: str = "mnist_cnn",
    image_shape: list[int] = [1, 28, 28],
    model_state: FlyteFile | None = None,
    repeats: int = 5,
) -> InferenceOutputs:
    """Time inference on a GPU, or on the CPU where there is none.

    Args:
        batch_sizes: images that the network gets at a time.
        network: a name of flyte_ddp.recipes.models.MODELS, with random weights.
        image_shape: channels, height, width.
        model_state: a training's output, which is timed in place of network, on images of the shape it was trained on.
        repeats: how often each batch size is timed, a fifth of a second at least.
    """
    return time_inference(
        batch_sizes=batch_sizes, network=network, image_shape=image_shape, model_state=model_state, repeats=repeats
    )
