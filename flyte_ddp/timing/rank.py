"""How fast a network predicts: from normalised images in the host's memory to scores on the device."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.data.prepared import prepared
from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipes.images import Normaliser
from flyte_ddp.recipes.models import build_model
from flyte_ddp.timing.measurement import DATA_PARALLEL, Measurement, TimingJob

WARM_UP = 3  # forward passes: the first ones choose algorithms and allocate memory


@torch.inference_mode()
def run(environment: Environment, link: Link, job: TimingJob) -> list[Measurement]:
    """Each method with each batch size, once; the ranks work at the same time, each on batches of its own."""
    torch.set_num_threads(environment.threads)
    settle_arithmetic()
    options = job.options
    with process_group(environment, options.timeout_seconds) as device:
        description = prepared.read_description(job.data)
        images = torch.from_numpy(prepared.open_split(job.data, "test")[0])
        normalise = Normaliser(description.mean, description.std, torch.device("cpu"))
        model = build_model(options.model, 1, description.image_shape, len(description.classes)).eval()
        model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        timings = []
        for batch_size in options.sizes:
            for method in job.methods:
                devices = max(1, torch.cuda.device_count()) if method == DATA_PARALLEL else 1
                batch = normalise(images[torch.arange(devices * batch_size) % len(images)])
                batch = batch.pin_memory() if device.type == "cuda" else batch
                forward = prediction(method, model, batch, device)
                rate = len(batch) * environment.world.size * passes_per_second(forward, device, options.seconds)
                together = devices * environment.world.size
                timings.append(Measurement(method, together, environment.threads, batch_size, rate))
                link.heartbeat()
        return timings


def prediction(method: str, model: nn.Module, batch: Tensor, device: torch.device) -> Callable[[], Tensor]:
    if method == DATA_PARALLEL:
        wrapped = nn.DataParallel(model)  # moves its input by itself
        return lambda: wrapped(batch)
    return lambda: model(batch.to(device, non_blocking=True))


def passes_per_second(forward: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Of each rank, while all of them run; every rank makes as many passes as the others."""
    seconds_of(forward, WARM_UP, device)
    count = torch.tensor(seconds / seconds_of(forward, WARM_UP, device) * WARM_UP, device=device).ceil()
    distributed.all_reduce(count, distributed.ReduceOp.MAX)
    return count.item() / seconds_of(forward, int(count), device)


def seconds_of(forward: Callable[[], Tensor], count: int, device: torch.device) -> float:
    """The time from when all ranks start to when all have finished."""
    distributed.barrier()
    started = time.perf_counter()
    for _ in range(count):
        forward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # where nn.DataParallel, too, gathers the outputs of the other GPUs
    distributed.barrier()
    return time.perf_counter() - started
