"""The loading study's rank: reads a folder of images as training does, with each setting in turn, and times it."""

import time
import warnings
from pathlib import Path

import torch

from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.launch.environment import Environment, available_cores
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.launch.link import Link
from flyte_ddp.loading.times import LoadingJob, LoadingTimes, TimedSetting
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.recipes.images import ImageClassifier, Normaliser


def run(environment: Environment, link: Link, job: LoadingJob) -> LoadingTimes:
    """Times every setting in every round, so that other load on the machine affects them equally."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # trying more workers than cores is intended
    torch.set_num_threads(environment.threads)
    device, settings = torch.device(environment.world.device), job.settings
    recipe = ImageClassifier(Hyperparameters(), Path(job.data))
    files, normalise = recipe.data("train"), Normaliser(recipe.description.mean, recipe.description.std, device)
    most = settings.most_workers or min(16, 2 * available_cores())
    images = min(settings.most_images, len(files))
    timed = [
        TimedSetting(workers, pin_memory, images, [])
        for workers in (0, *(2**power for power in range(most.bit_length())))
        for pin_memory in ((False, True) if device.type == "cuda" else (False,))
    ]
    for turn in range(settings.passes + 1):
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(turn))[:images]
        for one in timed if turn else timed[:1]:  # the first, not counted, loads the files into the page cache
            split = Streamed(files, device, one.workers, one.pin_memory)
            seconds = time_pass(split, normalise, order, settings.batch_size, link)
            if turn:
                one.seconds.append(seconds)
        print(f"Pass {turn} of {settings.passes}" if turn else "A first pass, not counted")
    return LoadingTimes(timed, str(device), max(peak_memory(), peak_memory(of_children=True)))


def time_pass(split: Streamed, normalise: Normaliser, order: torch.Tensor, batch_size: int, link: Link) -> float:
    """Seconds until all images of the order are on the device, normalised."""
    started = time.perf_counter()
    for images, _ in split.fetch(order.split(batch_size)):
        normalise(images)
        link.heartbeat()
    if split.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
