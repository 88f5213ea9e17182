"""Jobs of examples by other trainers and by us: `make bench-trainers`.

They are charlm by Lightning and Accelerate, and finetune_text by Lightning and transformers' Trainer.
Network, data, initial weights, global batch, optimizer and schedule are the same; the rest is benchmarks/trainers, each
file as a user of that trainer writes it. The trainers take turns, with a seed for each run. Those of finetune_text see
the sentences in the same order, so that with --dropout 0 they should end with the same loss.

- lines: without comments, docstrings and blank lines, and without network, data and settings. Ours are those of the
  recipe and of the call.
- training seconds: from the first to the last optimizer step of each epoch, by one clock for all. Total: the command.
- 1 and 2 ranks: relative Euclidean distance of their weights, including batch norm's statistics.
- ours / the faster: our training seconds in each run by those of whichever other trainer was faster in it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.engine import hardware, spread
from benchmarks.trainers.lines import lines_written

ROOT = Path(__file__).parents[1]
OTHERS = {
    "charlm": ("lightning", "accelerate"),
    "finetune_text": ("lightning", "transformers"),
}
MEASURES = {"charlm": "perplexity", "finetune_text": "accuracy"}
BY_TORCHRUN = ("accelerate", "transformers")


@dataclass(frozen=True)
class Training:
    job: str
    trainer: str
    ranks: int
    epochs: int
    seed: int
    dropout: float

    def run(self, folder: Path) -> "Trained":
        """Runs the user's command in the folder; raises SystemExit with the trainer's last lines if it fails."""
        if self.job == "finetune_text":
            from benchmarks.trainers.encoder import write_encoder  # it imports transformers

            write_encoder(folder / "encoder", self.dropout)
        # Without GPUs, Accelerate's own launcher starts several processes only with MPI
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m"]
        launcher = torchrun if self.trainer in BY_TORCHRUN and self.ranks > 1 else []
        numbers = map(str, (self.ranks, self.epochs, self.seed))
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "benchmarks.trainers.measured", self.job, self.trainer, *numbers],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            sys.exit(f"{self} failed:\n{done.stdout[-3000:]}")
        steps = json.loads((folder / "steps.json").read_text())
        measures = json.loads((folder / "measures.json").read_text())
        return Trained(seconds, steps, measures, torch.load(folder / "model.pt", weights_only=True))


class Trained(NamedTuple):
    """Seconds of the whole command, times of the steps, measures of the test samples, weights by name."""

    seconds: float
    steps: list[float]
    measures: dict[str, float]
    weights: dict[str, torch.Tensor]

    def training_seconds(self, epochs: int) -> float:
        size = len(self.steps) // epochs
        return sum(self.steps[first + size - 1] - self.steps[first] for first in range(0, len(self.steps), size))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Euclidean, of all floating-point entries, relative to the first."""

    def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([weights[name].double().flatten() for name in sorted(one) if one[name].is_floating_point()])

    return float((flat(one) - flat(other)).norm() / flat(one).norm())


class Row(NamedTuple):
    """What one run measured of a job, a trainer and a number of ranks."""

    training: float
    whole: float
    loss: float
    measure: float
    ranks_apart: float


Key = tuple[str, int, str]  # job, ranks, trainer


def measure(arguments: argparse.Namespace, seed: int) -> Iterator[tuple[Key, Row]]:
    """A row for each job, number of ranks and trainer."""
    single: dict[tuple[str, str], Trained] = {}
    for job, ranks in product(arguments.jobs, arguments.ranks):
        for trainer in (*OTHERS[job], "ours"):
            training = Training(job, trainer, ranks, arguments.epochs, seed, arguments.dropout)
            with tempfile.TemporaryDirectory(prefix="trainers-") as place:
                trained = training.run(Path(place))
            alone = single.setdefault((job, trainer), trained)
            yield (
                (job, ranks, trainer),
                Row(
                    training=trained.training_seconds(arguments.epochs),
                    whole=trained.seconds,
                    loss=trained.measures["loss"],
                    measure=trained.measures[MEASURES[job]],
                    ranks_apart=distance(alone.weights, trained.weights),
                ),
            )


def cells(rows: list[Row]) -> list[str]:
    training, whole, loss, measures, apart = zip(*rows, strict=True)
    return [
        *(spread(values, digits) for values, digits in ((training, 1), (whole, 1), (loss, 4), (measures, 4))),
        f"{max(apart):.0e}" if any(apart) else "",
    ]


def ratios(measured: dict[Key, list[Row]]) -> Iterator[str]:
    """Lines with our training seconds divided by those of the faster of the others, run by run."""
    for (job, ranks, trainer), rows in measured.items():
        if trainer == "ours":
            others = zip(*(measured[job, ranks, other] for other in OTHERS[job]), strict=True)
            each = [ours.training / min(row.training for row in run) for ours, run in zip(rows, others, strict=True)]
            yield f"ours / the faster, {job}, ranks {ranks}: {spread(each)}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--jobs", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dropout", type=float, default=0.1, help="of finetune_text's encoder")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs must be at least 1, got {arguments.runs}")
    return arguments


def main() -> None:
    arguments, measured = parse(), dict[Key, list[Row]]()
    for seed in range(1, arguments.runs + 1):
        for key, row in measure(arguments, seed):
            measured.setdefault(key, []).append(row)
            print(f"run {seed}: {key}: {row}", file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "accelerate", "transformers"))
    print(f"{hardware()}, {versions}; n = {arguments.runs}, {arguments.epochs} epochs; median [range]\n")
    print(
        "| job | ranks | trainer | lines | training seconds | total seconds | test loss | test measure "
        "| 1 and 2 ranks apart, at most |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (job, ranks, trainer), rows in measured.items():
        named = f"{job}, {MEASURES[job]}"
        print(f"| {' | '.join([named, str(ranks), trainer, str(lines_written(job, trainer)), *cells(rows)])} |")
    print("", *ratios(measured), sep="\n")


if __name__ == "__main__":
    main()
