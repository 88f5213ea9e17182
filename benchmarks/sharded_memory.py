"""What memory a rank takes for a training, with and without sharding.

    python -m benchmarks.sharded_memory --ranks 1 2 4

The network has 100 million parameters in 24 units, the optimizer is AdamW: 16 bytes per parameter of weights, gradients
and its state. Counted is the memory that the kernel cannot take back: neither the file's pages in its cache nor those
mapped. Without sharding a rank takes the same among any number of them, so this is measured with one.
"""

import argparse
from typing import Any

import torch
from torch import nn

from benchmarks.checkpoint_memory import DEPTH, MEGABYTE, SAMPLES, WIDTH, Large, Peak, resident
from benchmarks.engine import hardware
from benchmarks.gpu_rows import training
from flyte_ddp.engine import worker
from flyte_ddp.engine.block_cache import BlockCache
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.set_up import set_up
from flyte_ddp.launch.environment import Environment, choose_world
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.settings import TrainingSettings

NAME = "benchmarks.sharded_memory"  # also where this file is the program
IDEAL = 16 * DEPTH * (WIDTH + 1) * WIDTH / MEGABYTE


class Sharded(Large):
    shard = ("?", "??")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


def measure(environment: Environment, link: Link, job: Job) -> tuple[float, ...]:
    """MB that this rank takes: at most while it sets up, after two steps, at most within the second one, and at most
    while a checkpoint is written."""
    worker.leave_dynamo_out()
    with process_group(environment, job.options.timeout_seconds) as device:
        before = resident()

        def most(peak: Peak, start: int) -> float:
            return (peak.bytes + start - before) / MEGABYTE

        start = resident()
        with Peak() as peak:
            parts = set_up(environment, device, job, BlockCache(environment))
        found = [most(peak, start)]
        batches = parts.train.epoch(0, 0)
        batch = next(batches)
        parts.state.train_step(batch, False)
        with Peak() as peak:
            start = resident()
            parts.state.train_step(batch, False)
        found += [(resident() - before) / MEGABYTE, most(peak, start)]
        checkpoints = worker.checkpoints_of(environment, link, job)
        with Peak() as peak:
            start = resident()
            checkpoints.save(parts.state)
            checkpoints.close()
        return *found, most(peak, start)


def train(ranks: int, sharding: str) -> list[Any]:
    settings, world = TrainingSettings(batch_size=SAMPLES, precision="float32"), choose_world("gloo", ranks, SAMPLES)
    return training.train(f"{NAME}:Sharded", settings, world, target=f"{NAME}:measure", sharding=sharding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    print(f"{hardware()}; MB of the rank that takes most\n")
    print(
        "| sharding | ranks | ideal | kept between steps | most in a step | most at the start | most in a checkpoint |"
    )
    print("|---|---|---|---|---|---|---|")
    for ranks, sharding in [(1, "off"), *((ranks, "full") for ranks in parser.parse_args().ranks)]:
        start, kept, step, saving = (max(values) for values in zip(*train(ranks, sharding), strict=True))
        ideal = IDEAL / ranks if sharding == "full" else IDEAL
        print(
            f"| {sharding} | {ranks} | {ideal:.0f} | {kept:.0f} | {step:.0f} | {start:.0f} | {saving:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
