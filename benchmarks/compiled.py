"""What torch.compile gains in a step of the char-LM: `python -m benchmarks.compiled --runs 3`.

With the option, and without; in turns, each in a process of its own, on a GPU if there is one. That option is refused
without a GPU, so the engine's parts are put together here.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import distributed

from benchmarks.engine import hardware, spread
from benchmarks.many_ranks import Repeated, names_of, untold
from examples.charlm.recipe import CharLM
from examples.charlm.settings import Settings
from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.network.compiled import compile_layers, compile_now
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.launch.link import Link

STEPS, SAMPLES = 32, 32
SIZES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "without dropout": {"dropout": 0.0},
    "512 wide, 8 layers": {"width": 512, "layers": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "HOW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(*one(arguments.one[0], arguments.one[1] == "compiled"))
        return
    print(f"{hardware()}; {SAMPLES} samples; n = {arguments.runs}\n")
    print("| char-LM | ms per step, median [range] | compiled | gained, median [range] | seconds to compile |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        runs = [(measured(size, "plain"), measured(size, "compiled")) for _ in range(arguments.runs)]
        plain, fast = ([each[kind][0] for each in runs] for kind in (0, 1))
        gains = [one / other for one, other in zip(plain, fast, strict=True)]
        seconds = [compiled[1] for _, compiled in runs]
        print(
            f"| {size} | {spread(plain, 1)} | {spread(fast, 1)} | {spread(gains)} | {spread(seconds, 0)} |", flush=True
        )


def measured(size: str, how: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.compiled", "--one", size, how]
    milliseconds, seconds = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return float(milliseconds), float(seconds)


def one(size: str, is_compiled: bool) -> tuple[float, float]:
    """Milliseconds per step, and the seconds that compiling took."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.NamedTemporaryFile() as meeting:
        distributed.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)
        recipe: Any = CharLM(Settings(characters=20_000, **SIZES[size]), None)
        recipe.device = device
        split = Repeated(recipe, SAMPLES * STEPS)
        train, test = TrainBatches(split, SAMPLES, 1, 0, 1), EvaluationBatches(split, SAMPLES, 0, 1)
        model = recipe.model().to(device)
        names = names_of(recipe, model, train)
        if is_compiled:
            compile_layers(recipe, [model])
        state = TrainingState(recipe, model, names, untold(device), train, device, autocast=False, total_steps=STEPS)
        started = time.perf_counter()
        compile_now(state, train, test, Link())
        seconds = time.perf_counter() - started
        state.parallel.train()
        times = []
        for shares in train.steps(0):
            started = time.perf_counter()
            state.train_step(shares, False)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        distributed.destroy_process_group()
    return round(statistics.median(times[2:]) * 1e3, 2), round(seconds, 1)


if __name__ == "__main__":
    main()
