"""A process that tells a tracker of a recorded training: python -m tests.report.track RECORDED LOGS OPTIONS."""

import dataclasses
import json
import pickle
import sys
import time
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
    started = time.monotonic()
    if tracker:
        for event in events:
            tracker(event)
    told = time.monotonic()
    if tracker:
        tracker.close()
    closed = time.monotonic()
    print(json.dumps({"urls": urls, "tell_seconds": told - started, "close_seconds": closed - told}))


if __name__ == "__main__":
    main()
