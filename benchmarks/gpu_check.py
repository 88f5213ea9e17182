"""Checks what this project says about GPUs on this machine's: `python -m benchmarks.gpu_check --data FOLDER`.

It takes ten minutes and needs torch, numpy and this folder, but no Flyte and no network. FOLDER has the original files
of MNIST (MNIST/raw/*.gz) and of CIFAR-10 (CIFAR10/cifar-10-batches-py); rows that lack something say what. The exit
status is 1 if a row fails.
"""

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu_rows import bits, faults, speed
from benchmarks.gpu_rows.row import Machine, Missing
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import available_cores, visible_gpus

ROWS = [*bits.ROWS, *faults.ROWS, *speed.ROWS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the original files")
    parser.add_argument("--quick", action="store_true", help="leave out the longer rows")
    parser.add_argument("--rows", default="", help="only those with this in their title")
    arguments = parser.parse_args()
    launcher.warm_up()
    gpus = visible_gpus()
    print(f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}, {available_cores()} cores, torch {version('torch')}\n")
    print("| check | | result | seconds |\n|---|---|---|---|")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        machine = Machine(gpus, arguments.data, Path(place))
        for row in ROWS:
            if arguments.rows not in row.title or (arguments.quick and not row.is_quick):
                continue
            started = time.perf_counter()
            try:
                mark, result = "passed", row.check(machine)
            except Missing as missing:
                mark, result = "left out", str(missing)
            except Exception as error:  # whatever it is, the other rows still run
                mark, result = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
                print(f"{row.title}: {error}", file=sys.stderr)
                failed += 1
            print(f"| {row.title} | {mark} | {result} | {time.perf_counter() - started:.1f} |", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
