"""Trainings by virtual ranks in random configurations, many in the same processes."""

import copy
import hashlib
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn import functional as F
from torch.utils.data import Dataset

from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.evaluations import evaluate
from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.set_up import SetUp, set_up
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.fields import setting
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings

RANKS, WIDTH, CLASSES, LENGTH = (1, 2, 3, 5), 16, 4, 6
STEPS = 6


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """choices: of everything else, by this seed."""

    choices: int = setting(0, minimum=0)
    precision: str = setting("float32")


def settings_of(number: int) -> Settings:
    chosen = random.Random(number)
    batch_size = chosen.randint(8, 40)
    return Settings(
        choices=number,
        seed=number,
        batch_size=batch_size,
        test_batch_size=chosen.randint(5, 60),
        virtual_ranks=chosen.randint(5, 8),
        precision=chosen.choice(["float32", "float32", "bfloat16"]),
        validation_fraction=chosen.choice([0.0, 0.2]),
        freeze=chosen.choice(["", "", "first"]),
    )


class Chosen(Recipe):
    """A network, loss, optimizer and more that are drawn from settings.choices."""

    settings: Settings

    def __init__(self, settings: Settings, data_path: Any = None):
        super().__init__(settings, data_path)
        chosen = self._chosen = random.Random(-settings.choices)
        self.kind = chosen.choice(["dense", "convolution", "attention", "embedding", "experts"])
        self.clip_norm = chosen.choice([0.0, 0.1, 1.0])
        self.ema_decay = chosen.choice([0.0, 0.9])
        self.dropout = chosen.choice([0.0, 0.3])
        self.is_normalised = chosen.random() < 0.5
        # Batch norm needs whole parts
        self.micro_batch = 0 if self.is_normalised else chosen.choice([0, 1, 2])
        self.is_weighted = chosen.random() < 0.5
        self.is_augmented = chosen.random() < 0.5
        self.name = chosen.choice(["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
        self.train_fraction = chosen.choice([1.0, 0.61])
        self.scale = 2.0 ** chosen.choice([-30, 0, 0, 30])
        self.activation_checkpointing = chosen.choice([(), ("first",)])
        self.source = chosen.choice(["tensors", "dataset", "memory map", "lengths"])
        if self.source == "lengths":  # other layers would see what fills them up
            self.kind, self.length_window = chosen.choice(["dense", "experts"]), chosen.choice([0, 3])

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(self.settings.choices)
        inputs = torch.randn(150, LENGTH, WIDTH, generator=generator)
        labels = torch.randint(CLASSES, (150,), generator=generator)
        rows = slice(0, 110) if split == "train" else slice(110, 150)
        if self.source == "memory map":
            return [mapped(part[rows]) for part in (inputs, labels)]
        if self.source == "tensors":
            return inputs[rows], labels[rows]
        return Rows(inputs[rows], labels[rows], self.lengths(split))

    def lengths(self, split: str) -> list[int] | None:
        count = 110 if split == "train" else 40
        return [1 + 5 * number % LENGTH for number in range(count)] if self.source == "lengths" else None

    def model(self) -> nn.Module:
        return Network(self.kind, self.dropout, self.is_normalised)

    def augment(self, batch: Any, draw: Any) -> Any:
        return (batch[0] * (1 + 0.1 * draw.normal(WIDTH)[:, None]), batch[1]) if self.is_augmented else batch

    def measure(self, outputs: Tensor, batch: Any) -> Any:
        losses = F.cross_entropy(outputs.float(), batch[1], reduction="none")
        weights = (batch[1] % 3).float() if self.is_weighted else torch.ones_like(losses)
        correct = (outputs.argmax(1) == batch[1]).float()
        objective = losses * weights * self.scale
        return {"loss": (losses * weights, weights), "objective": (objective, weights), "accuracy": correct}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.name)(model.parameters(), lr=0.01)
        return optimizer


class Rows(Dataset[Any]):
    def __init__(self, inputs: Tensor, labels: Tensor, lengths: list[int] | None):
        self.inputs, self.labels, self.lengths = inputs, labels, lengths or [LENGTH] * len(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index, : self.lengths[index]], self.labels[index]


def mapped(part: Tensor) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, part.numpy())
        file.flush()
        return np.load(file.name, mmap_mode="r")


class Network(nn.Module):
    def __init__(self, kind: str, dropout: float, is_normalised: bool):
        super().__init__()
        self.kind = kind
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if kind == "convolution" else nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if is_normalised else nn.Identity()
        self.middle = (
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True) if kind == "attention" else None
        )
        self.words = nn.Embedding(50, WIDTH) if kind == "embedding" else None
        # Of which the last gets a sample in few parts, and in few batches
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) if kind == "experts" else None
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.words is not None:
            inputs = inputs + self.words((inputs[..., 0].abs() * 20).long().clamp(max=49))
        hidden = self.first(inputs.movedim(1, 2)).movedim(1, 2) if self.kind == "convolution" else self.first(inputs)
        hidden = hidden if self.middle is None else self.middle(hidden)
        if self.kind in ("dense", "experts"):  # the same weights again; nothing where a sample is filled up
            hidden = self.first(hidden.tanh()) * (inputs != 0).any(2, keepdim=True)
        if self.experts is not None:
            routes = (inputs[:, 0, 0] > 0).long() + (inputs[:, 0, 0] > 1.2).long()
            sent = [hidden[routes == number] for number in range(len(self.experts))]
            routed = torch.empty_like(hidden)
            for number, (expert, rows) in enumerate(zip(self.experts, sent, strict=True)):
                if len(rows):
                    routed = routed.index_put(((routes == number).nonzero()[:, 0],), expert(rows).to(routed.dtype))
            hidden = hidden + routed * (inputs != 0).any(2, keepdim=True)
        logits: Tensor = self.last(self.dropout(self.norm(hidden.sum(1) / LENGTH).relu()))
        return logits


def train_all(environment: Environment, link: Link, asked: tuple[Job, Sequence[int], str]) -> list[dict[Any, str]]:
    """Of each configuration, the digests after training on each number of ranks, and of one that changes ranks."""
    job, numbers, folder = asked
    torch.set_num_threads(1)
    found = []
    for number in numbers:
        settings = settings_of(number)
        of_configuration = replace(job, settings=settings)
        digests: dict[Any, str] = {}
        for ranks in RANKS:
            digests[ranks] = _trained(environment, link, of_configuration, ranks, Path(folder, f"{number}-{ranks}"))
        if environment.rank < 3:
            half = Path(folder, f"{number}-half")
            _trained(environment, link, of_configuration, 3, half, until=STEPS // 2)
        if environment.rank < 2:
            digests["changed"] = _trained(
                environment, link, of_configuration, 2, Path(folder, f"{number}-changed"), saved=half.with_suffix(".pt")
            )
        found.append(digests)
    return found


def _trained(
    environment: Environment,
    link: Link,
    job: Job,
    ranks: int,
    path: Path,
    until: int = STEPS,
    saved: Path | None = None,
) -> str:
    """The digest on rank 0 of weights, optimizer and measures; saves the state where that is not the end.

    Steps of several ranks are audited.
    """
    if environment.rank >= ranks:
        return ""
    environment = replace(environment, world=World(ranks, ranks, "gloo", "cpu"))
    with process_group(environment, 120, FileStore(str(path), ranks)) as device:
        setup = set_up(environment, device, job, BlockCache(environment))
        if saved:
            setup.state.load_state_dict(copy.deepcopy(torch.load(saved, weights_only=True)))
        if ranks > 1:
            assert isinstance(setup.state.parallel, ExactStep)
            setup.state.audit = Audit(setup.state.parallel, setup.train, 1, [Place("host", "CPU")] * ranks, complain)
        _train(setup, until)
        # Without the count of bad steps: a run ends at the first one, so no checkpoint has it
        pairs = setup.state.progress.sums.values[:-1].tolist()
        if until < STEPS and environment.rank == 0:
            torch.save(setup.state.state_dict(), path.with_suffix(".pt"))
        measures = evaluate(setup.state, setup.validation or setup.test, link).measures
        link.heartbeat()
    weights = [*setup.state.model.state_dict().values(), *setup.state.evaluated.state_dict().values()]
    moments = [value for each in setup.state.optimizer.state.values() for value in each.values()]
    tensors = [value for value in (*weights, *moments) if isinstance(value, Tensor)]
    content = b"".join(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content + repr((measures, pairs)).encode()).hexdigest()


def complain(epoch: int, step: int, reasons: Sequence[str]) -> None:
    raise AssertionError(reasons)


def _train(setup: SetUp, until: int) -> None:
    state = setup.state
    progress = state.progress
    state.parallel.train()
    while progress.epoch * len(setup.train) + progress.step < until:
        for shares in setup.train.steps(progress.epoch, progress.step):
            state.train_step(shares, False)
            if progress.epoch * len(setup.train) + progress.step == until:
                return
        progress.epoch, progress.step = progress.epoch + 1, 0
