"""What the engine adds to a loop as people write it: the same network, data, optimizer and batches, in one process.

    python -m benchmarks.bare_loop --runs 3

Every 20 steps of an epoch are followed by 20 of the bare loop, with a network, an optimizer and a loader of its own, so
that both meet the same load of the machine. With several ranks the bare loop has DistributedDataParallel.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engine import hardware, spread, train
from flyte_ddp.engine import loop, worker
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.fields import setting
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Measures, Recipe
from flyte_ddp.settings import TrainingSettings

BLOCK = 20  # steps between two changes of side, so that both meet the same load of the machine
SAMPLES, WORDS, LENGTH, CLASSES = 10_240, 30_000, 32, 4


class Pairs(NamedTuple):
    """Seconds of the engine's steps and of as many bare ones, block by block."""

    engine: list[float]
    bare: list[float]


class TinyBert(nn.Module):
    """An encoder of BERT-tiny's size, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        classes: Tensor = self.head(self.encoder(self.embedding(words)).mean(1))
        return classes


class Residual(nn.Sequential):
    """Two layers beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, features: Tensor) -> Tensor:
        changed: Tensor = features + super().forward(features)
        return changed


def mlp(layers: int, width: int) -> nn.Module:
    hidden = (module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(nn.Linear(LENGTH, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


NETWORKS = {
    "MLP of 3 layers, 512 wide": lambda: mlp(1, 512),
    "tabular, 2 layers, 64 wide": lambda: mlp(0, 64),
    "BERT-tiny, 30,000 words": TinyBert,
    "806 tensors": lambda: mlp(401, 32),
    "400 layers of a residual network": lambda: nn.Sequential(
        nn.Linear(LENGTH, 64), *(Residual(64) for _ in range(200)), nn.Linear(64, CLASSES)
    ),
}


@dataclass(frozen=True)
class BareSettings(TrainingSettings):
    """Settings of these trainings.

    network: one of NETWORKS.
    """

    batch_size: int = 64
    epochs: int = 1
    precision: str = setting("float32", choices=("float32",))
    network: str = setting("tabular, 2 layers, 64 wide", choices=tuple(NETWORKS))


class Classifier(Recipe):
    """Classes of random rows."""

    settings: BareSettings

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        draws, count = torch.Generator().manual_seed(len(split)), SAMPLES if split == "train" else 64
        size = count, LENGTH
        words = "words" in self.settings.network
        features = torch.randint(WORDS, size, generator=draws) if words else torch.randn(size, generator=draws)
        return features, torch.randint(CLASSES, (count,), generator=draws)

    def model(self) -> nn.Module:
        return NETWORKS[self.settings.network]()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs

    def measure(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Measures:
        return {"loss": F.cross_entropy(outputs, batch[1], reduction="none")}


class BareLoop:
    """Ten lines that people write, on copies of the recipe's network and data."""

    def __init__(self, state: TrainingState, train: TrainBatches):
        self.recipe = state.recipe
        self.model: nn.Module = copy.deepcopy(state.model)
        self.optimizer = self.recipe.optimizer(self.model)
        if distributed.get_world_size() > 1:
            self.model = DistributedDataParallel(self.model)
        self.data, self.size = self.recipe.data("train"), train.batch_size // train.world_size
        self.batches = self.each()

    def each(self) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(self.data[0])).split(self.size)

    def block(self) -> float:
        self.model.train()
        started = time.perf_counter()
        for _ in range(BLOCK):
            indices = next(self.batches)
            features, labels = (leaf[indices] for leaf in self.data)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(features), labels)
            loss.backward()
            self.optimizer.step()
        return time.perf_counter() - started


def alternate(environment: Environment, link: Link, job: Job) -> Pairs:
    """Trains as the engine does, but pauses each epoch every few steps for as many of the bare loop."""
    pairs = Pairs([], [])

    def alternating(state: TrainingState, train: TrainBatches, *arguments: Any) -> None:
        bare, steps = BareLoop(state, train), train.steps
        bare.block()  # the first steps of a process are slow

        def between(*position: Any) -> Iterator[list[Batch]]:
            began = 0.0
            for number, shares in enumerate(steps(*position)):
                if number % BLOCK == 0:
                    if number:
                        pairs.engine.append(time.perf_counter() - began)
                        pairs.bare.append(bare.block())
                    began = time.perf_counter()
                yield shares

        with patch.object(train, "steps", between):
            loop_steps(state, train, *arguments)

    loop_steps = loop.train_until
    with patch.object(loop, "train_until", alternating):
        worker.run(environment, link, job)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=list(NETWORKS))
    arguments = parser.parse_args()
    print(f"{hardware()}; batches of {BareSettings().batch_size}, AdamW; n = {arguments.runs}\n")
    print("| network | ranks | ms of a bare step | ms of the engine's | ratio, median [range] |")
    print("|---|---|---|---|---|")
    for network in arguments.only:
        for ranks in arguments.ranks:
            found = [measured(network, ranks) for _ in range(arguments.runs)]
            bare, ours = (spread([1e3 * one[side] for one in found], 2) for side in (1, 0))
            print(
                f"| {network} | {ranks} | {bare} | {ours} | {spread([one[0] / one[1] for one in found], 3)} |",
                flush=True,
            )


def measured(network: str, ranks: int) -> tuple[float, float]:
    """Seconds of a step: the median block's, of the engine and of the bare loop."""
    settings = BareSettings(network=network, epochs=1)
    pairs = train(
        settings, None, ranks, worker="benchmarks.bare_loop:alternate", recipe="benchmarks.bare_loop:Classifier"
    )[0]
    medians = [sorted(side)[len(side) // 2] / BLOCK for side in pairs]
    return medians[0], medians[1]


if __name__ == "__main__":
    main()
