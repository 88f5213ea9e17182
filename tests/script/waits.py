"""A script that saves once and then waits, or goes on from what it has saved and ends."""

import json
import os
import sys
import threading
from pathlib import Path

place, rank = Path(sys.argv[1]), os.environ["RANK"]
if (place / "ckpt").exists():
    print("rank", rank, "goes on from", (place / "ckpt").read_text())
    sys.exit()
if rank == "0":
    with open(os.environ["DDP_EVENTS"], "a") as events:
        events.write(json.dumps({"step": 7, "loss": 0.5}) + "\n")
    progress = Path(os.environ["DDP_EVENTS"]).with_name("progress.jsonl")
    while '"step": 7' not in progress.read_text():
        threading.Event().wait(0.05)
    (place / "ckpt").write_text("step 7")
threading.Event().wait(120)  # where it is not killed, the test fails
