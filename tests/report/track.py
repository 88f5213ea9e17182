"""A process that tells a tracker of a recorded training: python -m tests.report.track RECORDED LOGS OPTIONS."""

import dataclasses
import json
import pickle
import sys
from pathlib import Path

from flyte_ddp.report.console import show_output
from flyte_ddp.report.tracking import open_tracker
from flyte_ddp.settings import RunOptions


def main() -> None:
    recorded, logs, options = sys.argv[1:]
    show_output()
    setting, events = pickle.loads(Path(recorded).read_bytes())
    Path(logs).mkdir()
    setting = dataclasses.replace(setting, logs=Path(logs), options=RunOptions.from_json(options))
    urls: list[str] = []
    tracker = open_tracker(setting, urls.append)
    if tracker:
        for event in events:
            tracker(event)
        tracker.close()
    print(json.dumps(urls))


if __name__ == "__main__":
    main()
