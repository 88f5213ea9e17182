"""Asks torch what it can do here, in a process of its own, started like a rank: torch may crash it."""

import warnings
from itertools import combinations
from typing import Any

import torch
from torch import distributed

from flyte_ddp.engine.set_up import choose_precision
from flyte_ddp.errors import InputError
from flyte_ddp.hardware.capabilities import Capabilities
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.text import gib


def survey(environment: Any, link: Any, inputs: tuple[Hyperparameters, RunOptions]) -> Capabilities:
    """What torch can do, and what a training with these inputs would; a target of launcher.launch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus, no_gpu = _usable_gpus()
    (hp, options), world, precision, refusal = inputs, None, "", ""
    try:
        world = choose_world(hp.backend, options.nproc, hp.batch_size)
        precision = choose_precision(hp.precision, torch.device(world.device))
    except InputError as error:
        refusal = error.message
    pairs = list(combinations(range(len(gpus)), 2))
    can = torch.cuda.can_device_access_peer
    both = sum(can(a, b) and can(b, a) for a, b in pairs)
    return Capabilities(
        torch=str(torch.__version__),  # unpickling its own type would import torch
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if distributed.is_nccl_available() else "",
        gpus=gpus,
        no_gpu=no_gpu,
        complaints=[str(warning.message) for warning in caught],
        peers=f"{both} of {len(pairs)} pairs" if pairs else "no pair of GPUs",
        cpu_bfloat16=[name for name, there in torch.cpu.get_capabilities().items() if "bf16" in name and there],
        world=world,
        precision=precision,
        refusal=refusal,
    )


def _usable_gpus() -> tuple[list[str], str]:
    """The GPUs, or none and the reason."""
    try:
        torch.cuda.init()
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # no GPU, no driver, one too old; a torch without CUDA
        return [], str(error)
    shown = "{}, {}, compute capability {}.{}".format
    return [shown(gpu.name, gib(gpu.total_memory), gpu.major, gpu.minor) for gpu in gpus], ""
