"""A list of a machine's devices, with the time of a training step on each of those that are chosen.

PYTHONPATH=. pyflyte run examples/measure/devices.py devices_wf --devices '["cpu", "cuda:0"]'
"""

from typing import NamedTuple

import numpy as np
import torch
from flytekit import task, workflow
from flytekit.types.file import FlyteFile
from matplotlib.figure import Figure
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from flyte_ddp.flyte1.resources import training_resources
from flyte_ddp.recipes.models import build_model
from flyte_ddp.report.surroundings import processor
from measure.page import show


class DevicesOutputs(NamedTuple):
    """The outputs: all devices that torch can use, the median seconds of a step on the chosen ones, and a page."""

    listed: dict[str, str]
    seconds: dict[str, float]
    report: FlyteFile


def list_devices() -> dict[str, str]:
    """Return what each device is, by torch's name for it."""
    found = {"cpu": f"{processor()}, {torch.get_num_threads()} threads"}
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = (
            f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        )
    return found


@task(enable_deck=True, deck_fields=(), **training_resources())
def time_devices(
    devices: list[str], network: str, image_shape: list[int], batch_size: int, repeats: int
) -> DevicesOutputs:
    listed = list_devices()
    print(*(f"{name}: {what}" for name, what in listed.items()), sep="\n")
    if missing := {*devices} - {*listed}:
        raise ValueError(
            f"devices must be among {', '.join(listed)}, which torch can use here, got {', '.join(sorted(missing))}: "
            "choose others, or none for all"
        )
    chosen = [name for name in listed if name in devices] or [*listed]
    timed = {name: time_step(name, network, image_shape, batch_size, repeats) for name in chosen}
    medians = {name: float(np.median(times)) for name, times in timed.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.2f} ms a step, {medians[chosen[0]] / median:.1f} times as fast as {chosen[0]}")
    text = f"{network}, {batch_size} images {image_shape} a step, float32; median and range of {repeats}<br>"
    text += "<br>".join(f"{name}: {what}" for name, what in listed.items())
    return DevicesOutputs(listed, medians, show("A step on each device", text, draw(timed)))


def time_step(device: str, network: str, image_shape: list[int], batch_size: int, repeats: int) -> np.ndarray:
    """Return the seconds (repeats,) of a step: forward and backward pass, and the optimizer's update."""
    torch.manual_seed(0)
    model = build_model(network, 0, tuple(image_shape), 10).to(device)
    images, labels = torch.rand(batch_size, *image_shape), torch.randint(10, (batch_size,))
    images, labels = images.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return np.array([timer.blocked_autorange(min_run_time=0.2).median for _ in range(repeats)])


def draw(timed: dict[str, np.ndarray]) -> Figure:
    """Draw a bar for each device, with the range of its seconds per step."""
    figure = Figure(figsize=(6, 1 + 0.6 * len(timed)))
    axes = figure.subplots()
    low, middle, high = 1000 * np.array([np.percentile(times, (0, 50, 100)) for times in timed.values()]).T
    axes.barh([*timed], middle, xerr=(middle - low, high - middle), capsize=3)
    axes.set(xlabel="milliseconds of a step")
    axes.invert_yaxis()
    return figure


@workflow
def devices_wf(
    devices: list[str] = [],
    network: str = "resnet9_small",
    image_shape: list[int] = [3, 32, 32],
    batch_size: int = 128,
    repeats: int = 5,
) -> DevicesOutputs:
    """Compare the CPU with GPUs; the pod has the registered number of GPUs.

    Args:
        devices: torch's names of the devices to time, such as cpu and cuda:0; by default all.
        network: a name of flyte_ddp.recipes.models.MODELS.
        image_shape: channels, height, width.
        batch_size: images of a step.
        repeats: how often each device is timed, a fifth of a second at least.
    """
    return time_devices(
        devices=devices, network=network, image_shape=image_shape, batch_size=batch_size, repeats=repeats
    )
