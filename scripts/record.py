"""A picture of the terminal while a training is killed and goes on: python -m scripts.record docs/killed.svg

Four ranks, which get SIGKILL in the second epoch; then the same command with three; then, elsewhere, one rank that
nobody disturbs. The picture plays once, faster than it happened; where there are no CSS animations, it shows the end.
"""

import io
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

HP = '{"dataset": "digits", "epochs": 3, "virtual_ranks": 12}'
RUNS = {"trained": (4, 3), "undisturbed": (1,)}  # ranks of the commands that write there
SHOWN = re.compile(r"ready after|Epoch \d of|resuming")  # of what a training prints
KILLED_IN, SECONDS = "Epoch 1 of", 2.0
PLAYED_SECONDS = 12.0


def main(file: str) -> None:
    console = Console(record=True, width=112, file=io.StringIO())
    moments: list[float] = []

    def show(line: str, style: str = "") -> None:
        console.print(Text(line, style), no_wrap=True, overflow="ellipsis")
        moments.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        for output, worlds in RUNS.items():
            for number, ranks in enumerate(worlds, 1):
                options = f'{{"nproc": {ranks}, "checkpoint_seconds": 1}}'
                show(f"$ … --output {output} --options '{options}'", "bold")
                place = str(Path(folder, output))
                run(["--output", place, "--hp", HP, "--options", options], number < len(worlds), show)
    svg = console.export_svg(title=f"… is python -m workflows.without_flyte --hp '{HP}'", unique_id="recording")
    svg = re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL)  # which would ask another host
    pace = PLAYED_SECONDS / (moments[-1] - moments[0])
    played = [
        f'[clip-path="url(#recording-line-{number})"] {{ animation: appear 0s {seconds:.1f}s both }}'
        for number, seconds in enumerate(pace * (moment - moments[0]) for moment in moments)
    ]
    style = "\n".join(["@keyframes appear { from { opacity: 0 } }", *played, "</style>"])
    Path(file).write_text(svg.replace("</style>", style, 1))


def run(arguments: list[str], is_killed: bool, show: Callable[..., None]) -> None:
    command = [sys.executable, "-m", "workflows.without_flyte", *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if SHOWN.search(line):
            show(line.rstrip())
        if is_killed and KILLED_IN in line:
            time.sleep(SECONDS)
            running.kill()
            show("Killed", "red")
            break
    running.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
