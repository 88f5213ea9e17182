"""Measures how robust the recipes are: `python -m benchmarks.stability FOLDER [--suites digits "digits, 24 epochs"]`.

Each suite trains a recipe with its defaults on many seeds, alternating between one rank and two, and counts the runs
that end no better than guessing and those whose loss leapt, see flyte_ddp/engine/monitor/loss_monitor.py. Then, as
margin, the learning rate is raised, factor by factor, until one of ten seeds fails.

Every run is kept in the folder: the same command resumes where it was interrupted, and several that run at the same
time share the work. Use a new folder after changing the code.
"""

import argparse
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from benchmarks.engine import hardware, percent, train
from benchmarks.gpu_rows.training import IMAGES
from flyte_ddp.data.image_files import link_images
from flyte_ddp.data.prepared.prepared import SPLITS, open_split
from flyte_ddp.data.sources.datasets import data_dir, prepare
from flyte_ddp.data.sources.image_index import index_folder, write_folder
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.engine.monitor.loss_monitor import GUESSING
from flyte_ddp.errors import NonFiniteError
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.failures import RankError
from flyte_ddp.recipes.hyperparameters import (
    CIFAR10Hyperparameters,
    FashionMNISTHyperparameters,
    FolderHyperparameters,
    Hyperparameters,
)
from flyte_ddp.recipes.images import ImageClassifier

PRESETS = Path(__file__).parents[1] / "presets"
FACTORS = (2.0, 3.0, 4.0, 6.0, 8.0)
EDGE_SEEDS = 10


@dataclass(frozen=True)
class Suite:
    """A recipe and a number of seeds; hp are the hyperparameters that differ from the defaults."""

    dataset: str
    seeds: int
    hp: Mapping[str, Any] = field(default_factory=dict)
    kind: type[Hyperparameters] = Hyperparameters

    def hyperparameters(self, seed: int, factor: float = 1.0) -> Hyperparameters:
        rate = self.kind(**self.hp).learning_rate * factor
        return self.kind(**{**self.hp, "seed": seed, "learning_rate": rate})


def preset(name: str) -> Mapping[str, Any]:
    values: dict[str, Any] = yaml.safe_load((PRESETS / name).read_text())
    return values


SUITES = {
    "digits": Suite("digits", 200),
    "digits, 24 epochs": Suite("digits", 40, {"epochs": 24}),
    "mnist": Suite("mnist", 20),
    "mnist, 10 epochs": Suite("mnist", 5, {"epochs": 10}),
    "mnist, presets/best.yaml": Suite("mnist", 5, preset("best.yaml")),
    "mnist, presets/tutorial.yaml": Suite("mnist", 3, preset("tutorial.yaml")),
    "fashion_mnist": Suite("fashion_mnist", 10, kind=FashionMNISTHyperparameters),
    "cifar10": Suite("cifar10", 5, kind=CIFAR10Hyperparameters),
    "cifar10, presets/cifar10-94.yaml": Suite("cifar10", 3, preset("cifar10-94.yaml"), CIFAR10Hyperparameters),
    "image_folder": Suite("image_folder", 10, kind=FolderHyperparameters),
}
EDGES = {
    "digits": Suite("digits", EDGE_SEEDS),
    "mnist": Suite("mnist", EDGE_SEEDS),
    "image_folder": Suite("image_folder", EDGE_SEEDS, kind=FolderHyperparameters),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        score: test accuracy in per cent; 0 if the run failed.
        rise: the largest difference between a logged training loss and the lowest before it.
        guessing: whether it ended no better than guessing, or failed.
        leaps: how often its loss leapt.
    """

    score: float
    rise: float
    guessing: bool
    leaps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suites", nargs="*", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--edges", nargs="*", default=list(EDGES), choices=list(EDGES))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(f"{hardware()}\n")
    print("| recipe | runs | no better than guessing | with a leap | largest rise of the loss | test accuracy |")
    print("|---|---|---|---|---|---|")
    for name in arguments.suites:
        outcomes = run_all(SUITES[name], arguments.folder)
        print(f"| {name} | {counts(outcomes)} | {percent([one.score for one in outcomes])} |", flush=True)
    print("\n| recipe | learning rate x | runs | no better than guessing | with a leap | largest rise of the loss |")
    print("|---|---|---|---|---|---|")
    for name in arguments.edges:
        for factor in FACTORS:
            outcomes = run_all(EDGES[name], arguments.folder, factor)
            print(f"| {name} | {factor:g} | {counts(outcomes)} |", flush=True)
            if any(one.guessing or one.leaps for one in outcomes):
                break


def counts(outcomes: list[Outcome]) -> str:
    guessing, leapt = sum(one.guessing for one in outcomes), sum(one.leaps > 0 for one in outcomes)
    return f"{len(outcomes)} | {guessing} | {leapt} | {max((one.rise for one in outcomes), default=0):.2f}"


def run_all(suite: Suite, folder: Path, factor: float = 1.0) -> list[Outcome]:
    """The outcomes of a suite's runs, except those that another process is working on."""
    data, outcomes = data_of(suite.dataset), []
    for seed in range(1, suite.seeds + 1):
        hp = suite.hyperparameters(seed, factor)
        settings = "-".join(f"{key}={value}" for key, value in suite.hp.items())
        place = folder / f"{suite.dataset}-{settings}-x{factor:g}-{seed}"
        with suppress(Timeout), FileLock(f"{place}.lock", blocking=False):
            if not place.exists():
                place.write_text(json.dumps(vars(run(hp, data, 1 + seed % 2))))
            outcomes.append(Outcome(**json.loads(place.read_text())))
    return outcomes


def data_of(dataset: str) -> Path:
    """The prepared dataset; for image_folder, the digits as PNG files."""
    if dataset != "image_folder":
        return prepare(dataset)
    digits, folder = prepare("digits"), data_dir() / "digits-as-files"
    for split in SPLITS:
        if not (folder / split).exists():
            folder.mkdir(exist_ok=True)
            write_folder(folder / split, [str(digit) for digit in range(10)], *open_split(digits, split))
    data = index_folder(folder, "digits", ImageSettings(), print)
    link_images(data, folder)
    return data


def run(hp: Hyperparameters, data: Path, ranks: int) -> Outcome:
    lowest, rise = math.inf, 0.0

    def on_event(event: Event) -> None:
        nonlocal lowest, rise
        if isinstance(event, StepLogged):
            loss = event.measures["loss"]
            lowest, rise = min(lowest, loss), max(rise, loss - lowest)

    try:
        result = train(hp, data, ranks, on_event=on_event, recipe=IMAGES)[0]
    except RankError as error:
        if error.failure.cause != NonFiniteError.__name__:
            raise
        return Outcome(0.0, math.inf, guessing=True, leaps=1)
    test, leaps = result.epochs[-1].test, [warning for warning in result.warnings if "leapt" in warning.reason]
    guessing = test["loss"] >= GUESSING * ImageClassifier(hp, data).constant_loss()
    return Outcome(100 * test["accuracy"], rise, guessing, len(leaps))


if __name__ == "__main__":
    main()
