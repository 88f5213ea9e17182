"""Recipes whose data are blocks, and what test_blocks.py has ranks do with them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from flyte_ddp.data.blocks.block_folder import BlockFolder
from flyte_ddp.data.blocks.blocks import Blocks
from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.fields import setting
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = setting(24, minimum=1)
    test_batch_size: int = setting(20, minimum=1)
    precision: str = setting("float32", choices=("float32",))
    log_interval: int = setting(1, minimum=1)
    window: int = setting(20, minimum=1)
    streams: int = setting(6, minimum=1)


class Noted(BlockFolder):
    """Notes which node fetches which block, in a file beside the data."""

    def fetch(self, number: int, path: Path) -> None:
        super().fetch(number, path)
        node = path.parent.parent.name.rpartition("-")[2]
        with open(note_of(Path(self.stored.url)), "a") as file:
            file.write(f"{node} {number}\n")


def note_of(folder: Path) -> Path:
    return folder.parent.parent / f"{folder.name}.fetched"


def fetched(folder: Path) -> dict[str, list[int]]:
    """By node: the blocks, as often as it has fetched them."""
    found: dict[str, list[int]] = {}
    for line in note_of(folder).read_text().splitlines():
        node, number = line.split()
        found.setdefault(node, []).append(int(number))
    return found


class Digits(Recipe):
    """data_path: a folder with the folders of blocks train and test, of images (n, 64) float32 and labels (n,)."""

    samples, headline = "digits", "accuracy"

    def data(self, split: str) -> Any:
        blocks = Noted(f"{self.data_path}/{split}")
        blocks.window, blocks.streams = self.settings.window, self.settings.streams
        return blocks

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["image"])

    def augment(self, batch: Any, random: Any) -> Any:
        return {**batch, "image": batch["image"] + 0.1 * random.normal(64)}

    def measure(self, outputs: Any, batch: Any) -> Any:
        loss = F.cross_entropy(outputs.float(), batch["label"], reduction="none")
        return {"loss": loss, "accuracy": outputs.argmax(1) == batch["label"]}

    def predictions(self, outputs: Any, batch: Any) -> Any:
        return batch["label"]


class Stored(Digits):
    """data_path: a URL."""

    def data(self, split: str) -> Any:
        blocks = BlockFolder(f"{self.data_path}/{split}")
        blocks.window, blocks.streams = self.settings.window, self.settings.streams
        return blocks


class Twice(Digits):
    passes_per_epoch = 2


class Iterated(Digits):
    def data(self, split: str) -> Any:
        class Endless(IterableDataset):
            def __iter__(self) -> Iterator[torch.Tensor]:
                yield torch.zeros(64)

        return Endless()


class Broken(Digits):
    """A reader of its own, which is wrong from block 5 on in the way that the last word of the folder's name says."""

    def data(self, split: str) -> Any:
        problem = Path(str(self.data_path)).name.rpartition("-")[2]

        def read(number: int) -> Any:
            image, label = np.full((10, 64), number / 60, np.float32), np.arange(10)
            if number < 5 or split == "test":
                return {"image": image, "label": label}
            if problem == "raises":
                raise RuntimeError("no such animal")
            return {
                "type": {"image": image.astype(np.float64), "label": label},
                "missing": {"image": image},
                "shorter": {"image": image[:9], "label": label[:9]},
                "uneven": {"image": image, "label": label[:9]},
                "words": {"image": image, "label": np.array(["a"] * 10)},
            }[problem]

        blocks = Blocks([10] * 60, read)
        blocks.window, blocks.streams = 20, 6
        return blocks


def train_on_two_nodes(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Each half of the ranks is a node."""
    world = replace(environment.world, local_size=environment.world.size // 2)
    return worker.run(replace(environment, world=world), link, job)
