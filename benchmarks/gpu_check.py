"""Checks what this project says about GPUs on this machine's: `python -m benchmarks.gpu_check --data FOLDER`.

It takes eight minutes and needs torch, numpy and this folder, but no Flyte and no network. FOLDER has the original
files of MNIST (MNIST/raw/*.gz) and of CIFAR-10 (CIFAR10/cifar-10-batches-py); rows that lack something say what. The
exit status is 1 if a row fails.
"""

import argparse
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu_rows import bits, examples, faults, in_one, speed, whole
from benchmarks.gpu_rows.row import Machine, Missing, Row
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import available_cores, visible_gpus

FIRST, *SPEED = speed.ROWS
SOON, WAITING = faults.ROWS[:4], faults.ROWS[4:]
# Those last that wait for time-outs: they may have to be left out
ROWS = [
    FIRST, *in_one.ROWS, *whole.ROWS, *bits.ROWS, *SOON, *examples.ROWS, *SPEED, *whole.LATER, *WAITING,
]  # fmt: skip
HEAD = "| check | | result | seconds |\n|---|---|---|---|"
SECONDS = 420.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the original files")
    parser.add_argument("--quick", action="store_true", help="leave out the longer rows")
    parser.add_argument("--only", default="", help="only those with this in their title")
    parser.add_argument("--rows", type=Path, help="file to write the table to, with the hardware and the versions")
    parser.add_argument("--cpu", action="store_true", help="as if there were no GPU")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"after which no other row begins ({SECONDS:g} by default)"
    )
    arguments = parser.parse_args()
    began = time.perf_counter()
    launcher.warm_up()
    gpus = 0 if arguments.cpu else visible_gpus()
    lines = [described(gpus), HEAD]
    print(f"{lines[0]}\n\n{HEAD}", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as place:
        machine = Machine(gpus, arguments.data, Path(place))
        for row in ROWS:
            if arguments.only not in row.title or (arguments.quick and not row.is_quick):
                continue
            started = time.perf_counter()
            if started - began > arguments.seconds:
                mark, result = "left out", "no time left: --seconds"
            else:
                mark, result = outcome(row, machine)
            failed += mark == "FAILED"
            lines.append(f"| {row.title} | {mark} | {result} | {time.perf_counter() - started:.1f} |")
            print(lines[-1], flush=True)
            if arguments.rows:  # each time: what comes next may end this process
                arguments.rows.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    sys.exit(failed > 0)


def outcome(row: Row, machine: Machine) -> tuple[str, str]:
    """The row's mark and result, in a line of the table."""
    try:
        mark, result = "passed", row.check(machine)
    except Missing as missing:
        mark, result = "left out", str(missing)
    except Exception as error:  # whatever it is, the other rows still run
        mark, result = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"{row.title}: {error}", file=sys.stderr, flush=True)
    return mark, result.replace("|", "/")


def described(gpus: int) -> str:
    """Hardware and versions."""
    found = f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}, {available_cores()} cores; "
    return f"{found}Python {platform.python_version()}, torch {version('torch')}, {platform.system()}"


if __name__ == "__main__":
    main()
