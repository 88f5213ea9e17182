"""A process that tells a tracker of a recorded training: python -m tests.report.track RECORDED LOGS OPTIONS."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flyte_ddp.report.console import show_output
from flyte_ddp.report.tracking import CLOSE_SECONDS, open_tracker
from flyte_ddp.settings import RunOptions

if TYPE_CHECKING:
    from tests.report.wandb_file import Logged

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = CLOSE_SECONDS + 60  # less than a silent server holds whoever waits for its answer


class Told(NamedTuple):
    urls: Any
    said: str  # standard error
    logs: Path

    @property
    def run(self) -> "Logged":
        from tests.report.wandb_file import Logged  # it imports wandb, which the tracker imports by itself

        (file,) = self.logs.glob("wandb/*run-*/*.wandb")
        return Logged(file)


def tell_tracker(recorded: tuple[Any, ...], folder: Path, options: dict[str, Any], **environment: str) -> Told:
    """What a tracker in a process of its own makes of a recorded training; its logs are put into the folder."""
    (folder / "recorded.pickle").write_bytes(pickle.dumps(tuple(recorded)))
    arguments = [str(folder / "recorded.pickle"), str(folder / "tracked"), json.dumps(options)]
    command, variables = [sys.executable, "-m", "tests.report.track", *arguments], {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return Told(json.loads(done.stdout), done.stderr, folder / "tracked")  # its output is the addresses alone


def main() -> None:
    recorded, logs, options = sys.argv[1:]
    show_output()
    setting, events = pickle.loads(Path(recorded).read_bytes())
    Path(logs).mkdir(exist_ok=True)
    setting = dataclasses.replace(setting, logs=Path(logs), options=RunOptions.from_json(options))
    urls: list[str] = []
    tracker = open_tracker(setting, Path(logs).parent, urls.append)
    if tracker:
        for event in events:
            tracker(event)
        tracker.close()
    print(json.dumps(urls))


if __name__ == "__main__":
    main()
