"""What a start takes: with a thousand and with a hundred million samples, and for the first step of a deep network.

    python -m benchmarks.starts --runs 3

Ranks are forked from a process that has imported torch, as in each training but the first of a Python process; so is
the bare loop. Memory is the largest that the rank has had. The samples are a byte each, in a file that is mapped, as
where data are larger than memory.
"""

import argparse
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.beside_bare import BareSettings, Classifier
from benchmarks.engine import hardware, spread
from benchmarks.gpu_rows.training import train
from benchmarks.overheads import FirstStep
from flyte_ddp.engine import worker
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Measures, Recipe
from flyte_ddp.settings import TrainingSettings

ONE, DEEP = World(1, 1, "gloo", "cpu"), "400 layers of a residual network"
SAMPLES = (1_000, 100_000_000)


class Many(Recipe):
    """Learns the mean of samples of one byte."""

    def data(self, split: str) -> Any:
        assert self.data_path
        return np.load(self.data_path, mmap_mode="r")[: None if split == "train" else 1000]

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch.float())
        return outputs

    def measure(self, outputs: Tensor, batch: Tensor) -> Measures:
        return {"loss": (outputs - batch).square().mean(1)}


class Start(NamedTuple):
    """Until the first step is done: seconds, those of processors in the rank, and its peak memory in MB."""

    seconds: float
    processor_seconds: float
    megabytes: float


def start_of(job: Job) -> Start:
    return Start(time.time() - job.launched, time.process_time(), peak_memory() / 1e6)


def until_first_step(environment: Environment, link: Link, job: Job) -> Start:
    starts, one_step = list[Start](), TrainingState.train_step

    def train_step(state: TrainingState, shares: list[Batch], *asked: bool) -> None:
        one_step(state, shares, *asked)
        starts.append(start_of(job))
        raise FirstStep

    with suppress(FirstStep), patch.object(TrainingState, "train_step", train_step):
        worker.run(environment, link, job)
    return starts[0]


def bare_first_step(environment: Environment, link: Link, job: Job) -> Start:
    """The same of a loop as people write it."""
    recipe = Classifier.__new__(Classifier)
    recipe.settings = job.settings  # type: ignore[assignment]
    (features, labels), model = recipe.data("train"), recipe.model()
    optimizer = recipe.optimizer(model)
    indices = torch.randperm(len(features))[: job.settings.batch_size]
    F.cross_entropy(model(features[indices]), labels[indices]).backward()
    optimizer.step()
    return start_of(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = range(parser.parse_args().runs)
    print(f"{hardware()}; n = {len(runs)}\n")
    print("| start of | seconds until the first step is done, median [range] | of processors | MB |\n|---|---|---|---|")
    launcher.warm_up(launcher.PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        for held_out in (0.0, 0.1):
            for samples in SAMPLES:
                path = Path(folder, f"{samples}.npy")
                np.lib.format.open_memmap(path, "w+", np.uint8, (samples, 1)).flush()
                settings = TrainingSettings(validation_fraction=held_out, precision="float32")
                named = f"{samples:,} samples{f', {held_out:.0%} of them for validation' if held_out else ''}"
                row(named, [started("Many", settings, "until_first_step", str(path)) for _ in runs])
    settings = BareSettings(network=DEEP)
    for named, target in ((DEEP, "until_first_step"), (f"{DEEP}, bare loop", "bare_first_step")):
        row(named, [started("benchmarks.beside_bare:Classifier", settings, target) for _ in runs])


def started(recipe: str, settings: TrainingSettings, target: str, source: str = "") -> Start:
    recipe = recipe if ":" in recipe else f"benchmarks.starts:{recipe}"
    found: Start = train(recipe, settings, ONE, target=f"benchmarks.starts:{target}", source=source)[0]
    return found


def row(named: str, found: list[Start]) -> None:
    seconds, of_processors, megabytes = zip(*found, strict=True)
    print(f"| {named} | {spread(seconds)} | {spread(of_processors)} | {spread(megabytes, 0)} |", flush=True)


if __name__ == "__main__":
    main()
