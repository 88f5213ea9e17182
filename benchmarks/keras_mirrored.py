"""Accuracy and seconds of the Keras network on one device, two devices and two workers, on a CPU.

`.venv-keras/bin/python -m benchmarks.keras_mirrored --runs 5`; each run has its own seed.
"""

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict

from benchmarks.engine import hardware, percent, spread
from flyte_ddp.keras.job import MirroredHyperparameters
from flyte_ddp.keras.task import train
from flyte_ddp.launch import launcher

WAYS: Dict[str, Dict[str, Any]] = {
    "MirroredStrategy, one CPU device": {"devices": "CPU:0"},
    "MirroredStrategy, two logical CPU devices": {"devices": "CPU:0,CPU:1"},
    "MultiWorkerMirroredStrategy, two workers": {"strategy": "multi_worker"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    launcher.warm_up(["tensorflow"])
    print(f"{hardware()}, tensorflow {version('tensorflow')}; n = {arguments.runs}\n")
    print("| strategy | training seconds, median [range] | test accuracy, mean ± standard deviation [range] |")
    print("|---|---|---|")
    for name, way in WAYS.items():
        seconds, accuracies = [], []
        for seed in range(1, arguments.runs + 1):
            with tempfile.TemporaryDirectory() as folder:
                result = train(MirroredHyperparameters(seed=seed, **way), Path(folder) / "model.keras")
            seconds.append(sum(epoch.train_seconds for epoch in result.epochs))
            accuracies.append(100 * result.epochs[-1].test["accuracy"])
        print(f"| {name} | {spread(seconds)} | {percent(accuracies)} |", flush=True)


if __name__ == "__main__":
    main()
