"""What memory a rank takes for a training, with and without sharding and virtual ranks, and how long a step takes.

    python -m benchmarks.sharded_memory --ranks 1 2 4

The network has 100 million parameters in 24 units, the optimizer is AdamW: 16 bytes per parameter of weights, gradients
and its state. Counted is the memory that the kernel cannot take back: neither the file's pages in its cache nor those
mapped, nor what glibc would keep after it is freed (MALLOC_MMAP_THRESHOLD_). Without sharding a rank takes the same
among any number of them, so this is measured with one. A step is the fastest of STEPS, in seconds.

    python -m benchmarks.sharded_memory --ranks 2 4 --virtual-ranks

This compares a sharded training with one of as many virtual ranks, and with one rank that is not sharded, which has the
same weights after the steps. AdamW is not fused: on a CPU, a fused one has other bits where tensors are cut. A step of
so few samples is mostly exchange, so --samples sets more.
"""

import argparse
import os
import time
from typing import Any

import torch
from torch import nn

from benchmarks.checkpoint_memory import DEPTH, MEGABYTE, SAMPLES, WIDTH, Large, Peak, resident
from benchmarks.engine import hardware
from benchmarks.gpu_rows import training
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.checkpoints.writer import make_checkpoints
from flyte_ddp.engine.compiler_compat import defer_dynamo_import
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import load_recipe
from flyte_ddp.engine.network.first_model import first_model
from flyte_ddp.engine.network.placement import to_device
from flyte_ddp.engine.set_up import set_up
from flyte_ddp.launch.environment import Environment, choose_world
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.model_files.frozen_base import FrozenBase
from flyte_ddp.settings import TrainingSettings

NAME = "benchmarks.sharded_memory"  # also where this file is the program
STEPS = 5
IDEAL = 16 * DEPTH * (WIDTH + 1) * WIDTH / MEGABYTE


class Sharded(Large):
    fsdp_units: tuple[str, ...] = ("?", "??")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


class Unfused(Large):
    fsdp_units: tuple[str, ...] = Sharded.fsdp_units

    def data(self, split: str) -> torch.Tensor:
        count = self.settings.batch_size if split == "train" else SAMPLES
        return torch.linspace(-1, 1, count * WIDTH).view(count, WIDTH)


def measure(environment: Environment, link: Link, job: Job) -> tuple[Any, ...]:
    """MB that this rank takes: at most until it has its part of the network, until it has tried that, in the second
    step, after it, and while a checkpoint is written; then seconds of a step, and the weights' digest in the end."""
    defer_dynamo_import()
    with process_group(environment, job.options) as device:
        with Peak() as in_set_up:
            before = resident()
            parts = set_up(environment, device, job, BlockCache(environment))
        shares = next(parts.train.steps(0))
        parts.state.train_step(shares, False)
        with Peak() as in_step:
            start = resident()
            parts.state.train_step(shares, False)
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            parts.state.train_step(shares, False)
            seconds.append(time.perf_counter() - began)
        progress = parts.state.progress
        progress.checkpoints = make_checkpoints(parts.state, environment, link.emit, job)
        with Peak() as in_checkpoint:
            kept = resident()
            progress.save(parts.state)
            progress.close()
        recipe = load_recipe(job, device)
        with Peak() as in_build:
            model, left_out, _ = first_model(recipe, job)
            to_device(recipe, model, FrozenBase(model, left_out), job.options, environment)
        found = (
            in_build.bytes,
            in_set_up.bytes,
            start - before + in_step.bytes,
            kept - before,
            kept - before + in_checkpoint.bytes,
        )
        return *(each / MEGABYTE for each in found), min(seconds), parts.state.digest()


def train(
    ranks: int, sharding: str, name: str = "Sharded", samples: int = SAMPLES, virtual_ranks: int = 0
) -> list[Any]:
    settings = TrainingSettings(batch_size=samples, precision="float32", virtual_ranks=virtual_ranks)
    world = choose_world("gloo", ranks, samples)
    return training.train(
        f"{NAME}:{name}", settings, world, target=f"{NAME}:measure", sharding=sharding, timeout_seconds=900
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--virtual-ranks", action="store_true", help="compare with as many virtual ranks as ranks")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a batch, with --virtual-ranks")
    given = parser.parse_args()
    print(f"{hardware()}; MB of the rank that takes most\n")
    columns = "ideal | kept | in a step | built: rank 0 | others | at the start | in a checkpoint | a step, s | weights"
    print(f"| sharding | ranks | virtual ranks | {columns} |")
    print(f"{'|---' * 12}|")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # else glibc keeps what is freed for later
    rows: list[tuple[Any, ...]] = [(1, "off"), *((ranks, "full") for ranks in given.ranks)]
    if given.virtual_ranks:
        rows = []
        for ranks in given.ranks:
            how = ("Unfused", given.samples)
            rows += [(ranks, "full", *how, 0), (ranks, "full", *how, ranks), (1, "off", *how, ranks)]
    for ranks, sharding, *more in rows:
        virtual_ranks = more[-1] if more else 0
        first, *others = found = train(ranks, sharding, *more)
        _, start, step, kept, saving, seconds, digest = (max(values) for values in zip(*found, strict=True))
        built = f"{first[0]:.0f} | {max((other[0] for other in others), default=0):.0f}"
        ideal = IDEAL / ranks if sharding == "full" else IDEAL
        print(
            f"| {sharding} | {ranks} | {virtual_ranks} | {ideal:.0f} | {kept:.0f} | {step:.0f} | {built} | {start:.0f} "
            f"| {saving:.0f} | {seconds:.2f} | {digest} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
