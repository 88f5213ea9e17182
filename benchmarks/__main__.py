"""Runs the benchmarks one after the other and prints the tables for RESULTS.md: `python -m benchmarks --runs 3`.

Not included are benchmarks.faults, which measures no speed, and benchmarks.against_trainers, which takes half an
hour: make bench-trainers.
"""

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = {
    "Overheads": "overheads --runs {runs}",
    "What the engine costs": "bare_loop --runs {runs}",
    "Memory of a checkpoint": "checkpoint_memory --ranks 1 2",
    "Compared with the tutorial": "against_tutorial --runs {runs}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each benchmark")
    runs, failed = parser.parse_args().runs, []
    if runs < 1:
        parser.error(f"--runs must be at least 1, got {runs}")
    for title, benchmark in BENCHMARKS.items():
        command = f"python -m benchmarks.{benchmark.format(runs=runs)}"
        print(f"## {title}\n\n`{command}`\n", flush=True)
        done = subprocess.run([sys.executable, *command.split()[1:]], cwd=Path(__file__).parents[1])
        if done.returncode:
            failed.append(title)
        print(flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
