"""The jobs of examples/charlm and examples/segmentation by Lightning, by Accelerate and by us: `make bench-trainers`.

Network, data, initial weights, global batch, optimizer and schedule are the same; the rest is benchmarks/trainers, each
file as a user of that trainer writes it. The trainers take turns, with a seed for each run.

- lines: without comments, docstrings and blank lines, and without network, data and settings. Ours are those of the
  recipe and of the call.
- training seconds: from the first to the last optimizer step of each epoch, by one clock for all. Total: the command.
- SIGKILL: of the last rank, in the middle of the epoch after half of them; then the same command is run again, and its
  weights are compared with those of an uninterrupted run.
- 1 and 2 ranks: relative Euclidean distance of their weights, including batch norm's statistics.
"""

import argparse
import ast
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.engine import hardware, spread

ROOT = Path(__file__).parents[1]
JOBS = {"charlm": "perplexity", "segmentation": "iou"}
TRAINERS = ("lightning", "accelerate", "ours")
RANKS = (1, 2)
PATIENCE_SECONDS = 180  # with a command of which a rank was killed


@dataclass(frozen=True)
class Training:
    job: str
    trainer: str
    ranks: int
    epochs: int
    seed: int

    def start(self, folder: Path, kill: str = "") -> "subprocess.Popen[str]":
        """Runs the user's command in the folder; kill is "rank step"."""
        # Without GPUs, Accelerate's own launcher starts several processes only with MPI
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m"]
        launcher = torchrun if self.trainer == "accelerate" and self.ranks > 1 else []
        numbers = map(str, (self.ranks, self.epochs, self.seed))
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "benchmarks.trainers.measured", self.job, self.trainer, *numbers],
            cwd=folder,
            env={**environment, "KILL": kill} if kill else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, folder: Path) -> "Trained":
        """Raises SystemExit with the trainer's last lines if it fails."""
        folder.mkdir(exist_ok=True)
        started = time.perf_counter()
        running = self.start(folder)
        output, _ = running.communicate()
        seconds = time.perf_counter() - started
        if running.returncode:
            sys.exit(f"{self} failed:\n{output[-3000:]}")
        steps = json.loads((folder / "steps.json").read_text())
        measures = json.loads((folder / "measures.json").read_text())
        return Trained(seconds, steps, measures, torch.load(folder / "model.pt", weights_only=True))

    def kill_and_run_again(self, folder: Path, undisturbed: "Trained") -> tuple[float, str]:
        """Seconds until the command and all its processes have ended, infinite if they don't, and what the same command
        does then."""
        folder.mkdir()
        steps = len(undisturbed.steps)
        steps_per_epoch = steps // self.epochs
        killed_at = self.epochs // 2 * steps_per_epoch + steps_per_epoch // 2
        running = self.start(folder, f"{self.ranks - 1} {killed_at}")
        try:
            running.communicate(timeout=PATIENCE_SECONDS + 2 * undisturbed.seconds)  # until all have closed its output
            seconds = time.time() - float((folder / "killed").read_text())
        except subprocess.TimeoutExpired:
            seconds = float("inf")
            os.killpg(running.pid, signal.SIGTERM)  # torchrun ends its ranks, which are no part of its process group
            time.sleep(5)
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
        again = self.run(folder)
        done = steps - len(again.steps)
        start = f"resumes from step {done} of {steps}" if done else "starts over"
        difference = distance(again.weights, undisturbed.weights)
        return seconds, f"{start}, {f'weights {difference:.0e} away' if difference else 'same bits'}"


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


def lines_written(job: str, trainer: str) -> int:
    script = count_lines((ROOT / "benchmarks" / "trainers" / f"{job}_{trainer}.py").read_text())
    recipe = (ROOT / "examples" / job / "recipe.py").read_text()
    return script + count_lines(recipe, without_network_and_data=True) if trainer == "ours" else script


def count_lines(source: str, without_network_and_data: bool = False) -> int:
    """Number of lines with code.

    In a recipe's module, its functions, its other classes and the method data count as network and data.
    """
    tree = ast.parse(source)
    left_out = list(_docstrings(tree))
    if without_network_and_data:
        recipe = next(node for node in tree.body if isinstance(node, ast.ClassDef) and _is_recipe(node))
        left_out += [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node != recipe]
        left_out += [node for node in recipe.body if isinstance(node, ast.FunctionDef) and node.name == "data"]
    excluded = {line for node in left_out for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in excluded for number, line in lines)


def _is_recipe(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Recipe" for base in node.bases)


def _docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            yield node.body[0]


class Row(NamedTuple):
    """What one run measured of a job, a trainer and a number of ranks."""

    training: float
    whole: float
    loss: float
    measure: float
    ended: float
    again: str
    ranks_apart: float


def measure(jobs: list[str], epochs: int, seed: int) -> Iterator[tuple[tuple[str, str, int], Row]]:
    """A row for each job, trainer and number of ranks."""
    single: dict[tuple[str, str], Trained] = {}
    for job, ranks, trainer in product(jobs, RANKS, TRAINERS):
        training = Training(job, trainer, ranks, epochs, seed)
        with tempfile.TemporaryDirectory(prefix="trainers-") as place:
            undisturbed = training.run(Path(place, "undisturbed"))
            ended, again = training.kill_and_run_again(Path(place, "killed"), undisturbed)
        alone = single.setdefault((job, trainer), undisturbed)
        yield (
            (job, trainer, ranks),
            Row(
                training=undisturbed.training_seconds(epochs),
                whole=undisturbed.seconds,
                loss=undisturbed.measures["loss"],
                measure=undisturbed.measures[JOBS[job]],
                ended=ended,
                again=again,
                ranks_apart=distance(alone.weights, undisturbed.weights),
            ),
        )


def cells(rows: list[Row]) -> list[str]:
    training, whole, loss, measures, ended, again, apart = zip(*rows, strict=True)
    return [
        *(spread(values, digits) for values, digits in ((training, 1), (whole, 1), (loss, 4), (measures, 4))),
        spread(ended, 1),
        "; ".join(sorted(set(again))),
        f"{max(apart):.0e}" if any(apart) else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.epochs < 2:
        parser.error("--runs must be at least 1 and --epochs 2, so that an epoch is done when the rank is killed")
    missing = [name for name in ("accelerate", "lightning") if find_spec(name) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not installed: `make bench-trainers` makes an environment with both")
    measured: dict[tuple[str, str, int], list[Row]] = {}
    for seed in range(1, arguments.runs + 1):
        for key, row in measure(arguments.jobs, arguments.epochs, seed):
            measured.setdefault(key, []).append(row)
            print(f"run {seed}: {key}: {row}", file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("lightning", "accelerate"))
    print(f"{hardware()}, {versions}; n = {arguments.runs}, {arguments.epochs} epochs; median [range]\n")
    print(
        "| job | ranks | trainer | lines | training seconds | total seconds | test loss | test measure "
        "| seconds from SIGKILL to the command's end | the same command then | 1 and 2 ranks apart, at most |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (job, trainer, ranks), rows in measured.items():
        named = f"{job}, {JOBS[job]}"
        print(f"| {' | '.join([named, str(ranks), trainer, str(lines_written(job, trainer)), *cells(rows)])} |")


if __name__ == "__main__":
    main()
