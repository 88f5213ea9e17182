"""Breaks training on purpose and prints the outcome: `make faults`, or `make faults ARGS="--kills 10"`.

Kills: at a random step, a random rank or the parent gets SIGKILL or SIGTERM; then the same training is started again
and its weights are compared, bit by bit, with those of an uninterrupted run.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import flyte_ddp.training
from benchmarks import engine
from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.prepared.writer import write_prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.events import Event, RunStarted, StepLogged
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

RANKS, EPOCHS = 3, 2  # among two, the order of a sum does not matter
JOBS = ("digits", "charlm")  # the second is the language model of examples/
ROOT = Path(__file__).parents[1]


def small_dataset(folder: Path) -> Path:
    digits = prepare("digits")
    (train, train_labels), (test, test_labels) = (prepared.open_split(digits, split) for split in ("train", "test"))
    names = [str(digit) for digit in range(10)]
    write_prepared(folder, "small", names, train[:1270], train_labels[:1270], test, test_labels)
    return folder


def train(job: str, data: str, folder: str) -> None:
    """The victim: trains with checkpoints as often as possible, and prints its progress."""
    steps = 0  # of an epoch

    def on_event(event: Event) -> None:
        nonlocal steps
        if isinstance(event, RunStarted):
            steps = event.steps_per_epoch or 0
            ranks = sorted(multiprocessing.active_children(), key=lambda process: process.name)
            print("pids", os.getpid(), *(process.pid for process in ranks))
            print("start", event.first_epoch * steps + event.first_step, flush=True)
        elif isinstance(event, StepLogged):
            print("step", event.epoch * steps + event.step, flush=True)

    common: dict[str, Any] = {"epochs": EPOCHS, "log_interval": 1, "precision": "float32"}
    if job == "digits":
        engine.train(Hyperparameters(batch_size=64, **common), Path(data), RANKS, folder, 0, on_event)
        return
    sys.path.insert(0, str(ROOT / "examples"))
    settings = resolve_name("charlm.settings:Settings")(characters=100_000, **common)
    options = RunOptions(nproc=RANKS, checkpoint_seconds=0)
    flyte_ddp.training.train("charlm.recipe:CharLM", settings, options, output=folder, on_event=on_event)


@dataclass
class Attempt:
    """What one run of the victim showed: its processes, its first step, its last step, its exit status."""

    pids: list[int]
    first: int
    last: int
    status: int


def run_victim(job: str, data: Path, folder: Path, kill_at: int = -1, victim: int = 0, number: int = 0) -> Attempt:
    """Runs the victim; at step kill_at, its process number victim (0 is the parent) gets the signal."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.faults", "--victim", job, str(data), str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout is not None
    attempt = Attempt([], 0, 0, 0)
    for line in running.stdout:  # ends when the last process that holds it has ended
        word, *numbers = line.split()
        if word == "pids":
            attempt.pids = [int(pid) for pid in numbers]
        elif word == "start":
            attempt.first = attempt.last = int(numbers[0])
        elif word == "step":
            attempt.last = int(numbers[0])
            if attempt.last == kill_at:
                os.kill(attempt.pids[victim], number)
    attempt.status = running.wait()
    return attempt


def has_ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether the process has ended, or ends within the time that a killed one needs to release its memory."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def weights_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()


@dataclass
class Row:
    tried: int = 0
    survived: int = 0
    repeated: int = 0
    identical: int = 0
    left: int = 0


def kill_at_random_moments(job: str, kills: int, seed: int) -> dict[str, Row]:
    """Kills the victim `kills` times; a row for each kind of process and signal."""
    rows: dict[str, Row] = defaultdict(Row)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ddp-faults-") as name:
        place = Path(name)
        data = small_dataset(place / "data")
        steps = run_victim(job, data, place / "undisturbed").last
        expected = weights_of(place / "undisturbed")
        for kill in range(kills):
            victim, number = kill % (RANKS + 1), (signal.SIGKILL, signal.SIGTERM)[kill // (RANKS + 1) % 2]
            folder = place / f"kill-{kill}"
            cut = run_victim(job, data, folder, chance.randint(1, steps - 1), victim, number)
            again = run_victim(job, data, folder)
            row = rows[f"{job}: {'parent' if victim == 0 else f'rank {victim - 1}'} gets {number.name}"]
            row.tried += 1
            row.survived += again.status == 0
            row.repeated = max(row.repeated, cut.last - again.first)
            row.identical += again.status == 0 and weights_of(folder) == expected
            row.left += sum(not has_ended(pid) for pid in cut.pids + again.pids) + len(list(folder.glob("ddp-*")))
            print(f"\r{job}: {kill + 1} of {kills} kills", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=54, help="how many times a process of each job is killed")
    parser.add_argument("--jobs", nargs="*", default=JOBS, choices=JOBS, help="what is trained")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--victim", nargs=3, metavar=("JOB", "DATA", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.victim:
        train(*arguments.victim)
        return
    kills: dict[str, Row] = {}
    for job in arguments.jobs:
        kills.update(kill_at_random_moments(job, arguments.kills, arguments.seed))
    print("| fault | tried | survived | steps repeated, at most | weights identical | left behind |")
    print("|---|---|---|---|---|---|")
    for name, row in kills.items():
        print(f"| {name} | {row.tried} | {row.survived} | {row.repeated} | {row.identical} | {row.left} |")
    bad = [row for row in kills.values() if not row.tried == row.survived == row.identical or row.left]
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
