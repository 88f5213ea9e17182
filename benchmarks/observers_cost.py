"""What observers cost: the same training with every observer on, and with none.

    python -m benchmarks.observers_cost [--dataset mnist] [--epochs 2] [--runs 5]

The observers are the console, the live report and an offline Weights & Biases run. Each training is a process of its
own, so that imports count; on and off alternate, so that a change in the machine's other load affects both.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import engine
from benchmarks.engine import spread
from benchmarks.gpu_rows.training import IMAGES
from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.sources import datasets
from flyte_ddp.launch import launcher
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.observers import Observers
from flyte_ddp.report.record import RunFinished, RunInfo
from flyte_ddp.settings import RunOptions


def train(mode: str, dataset: str, epochs: int) -> dict[str, float]:
    """One training, as the training task does it; seconds of the training loops, and of everything."""
    started = time.time()
    launcher.warm_up()
    hp, data = Hyperparameters(dataset=dataset, epochs=epochs), datasets.prepare(dataset)
    with tempfile.TemporaryDirectory() as folder:
        if mode == "off":
            results = engine.train(hp, data, folder=folder, checkpoint_seconds=30.0)
        else:
            info = info_of(hp, data, Path(folder, "logs"))
            with Observers(info, Goodput(started), page=Path(folder, "report.html")) as observers:
                results = engine.train(hp, data, folder=folder, checkpoint_seconds=30.0, on_event=observers)
                observers.end(RunFinished(results, Path(folder, "predictions.npy"), time.time() - started))
    return {"train": sum(epoch.train_seconds for epoch in results[0].epochs), "total": time.time() - started}


def info_of(hp: Hyperparameters, data: Path, logs: Path) -> RunInfo:
    logs.mkdir()
    return RunInfo(
        name="benchmark",
        tracking_id="benchmark",
        attempt=0,
        recipe=IMAGES,
        settings=hp,
        options=RunOptions(tracking="offline"),
        data=data,
        description=prepared.read_description(data),
        logs=logs,
        checkpoint="",
    )


def measure(mode: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.observers_cost", "--one", mode]
    command += ["--dataset", options.dataset, "--epochs", str(options.epochs)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    measured: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one", choices=("on", "off"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options.one, options.dataset, options.epochs)))
        return
    datasets.prepare(options.dataset)
    pairs: list[dict[str, dict[str, float]]] = []
    for number in range(options.runs):
        modes = ("off", "on") if number % 2 else ("on", "off")
        pairs.append({mode: measure(mode, options) for mode in modes})
    print(f"{engine.hardware()}; {options.dataset}, {options.epochs} epochs; n = {options.runs}\n")
    print("| seconds, median [range] | off | on | on / off |")
    print("|---|---|---|---|")
    for what, name in (("train", "training"), ("total", "total")):
        off, on = ([pair[mode][what] for pair in pairs] for mode in ("off", "on"))
        ratios = [with_all / without for with_all, without in zip(on, off, strict=True)]
        print(f"| {name} | {spread(off)} | {spread(on)} | {spread(ratios, 3)} |")


if __name__ == "__main__":
    main()
