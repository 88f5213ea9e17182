"""Kills one of two nodes again and again while they write or upload a sharded checkpoint, and prints what came of it.

The nodes are two agents of torchrun with a rank and a disk each; the storage is a folder. Each kill is before another
operation on a file of a checkpoint, and ends an attempt; the next one has to go on from the last whole checkpoint, and
the last one has to end with the bits of a training that nobody has disturbed.

    python -m benchmarks.lost_nodes --kills 20
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flyte_ddp.manifest import read_manifest, shards_beside
from flyte_ddp.whole_files import content_digest
from tests.commands import free_port, same

SETTINGS: dict[str, Any] = {"batch_size": 32, "validation_fraction": 0.2, "log_interval": 1}
REGISTERED = {"DDP_PROFILE": "sandbox", "DDP_NNODES": "2", "DDP_NPROC_PER_NODE": "1"}
PATIENCE_SECONDS = 300
MOST_OPERATIONS = 60  # some four checkpoints'


def start_node(number: int, port: int, root: Path, asked: str, log_file: Path) -> "subprocess.Popen[str]":
    """One core each: the result depends on a rank's threads."""
    disk = root / f"node-{number}"
    disk.mkdir(exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    run = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--master-port", str(port)]
    pin = (
        f"import os, sys; os.sched_setaffinity(0, [{cores[number % len(cores)]}]); os.execv(sys.argv[1], sys.argv[1:])"
    )
    environment = {**os.environ, **REGISTERED, "TMPDIR": str(disk), "GLOO_SOCKET_IFNAME": "lo"}
    with open(log_file, "w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", pin, sys.executable, *run, "-m", "tests.attempt.node", asked],
            env=environment, stdout=log, stderr=log, text=True,
        )  # fmt: skip


def attempt(root: Path, number: int, epochs: int, victim: int = -1, operation: int = 0) -> list[int]:
    """How the two nodes of an attempt end."""
    given = {"root": str(root), "attempt": number, "victim": str(victim), "operation": operation}
    asked, port = json.dumps({**given, "settings": {**SETTINGS, "epochs": epochs}}), free_port()
    nodes = [start_node(node, port, root, asked, root / f"log-{number}-{node}") for node in range(2)]
    try:
        return [node.wait(PATIENCE_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def logged(root: Path, number: int) -> str:
    """What the nodes of an attempt have said; a lost one's last words never reach the storage."""
    return "".join(file.read_text() for file in sorted(root.glob(f"log-{number}-*")))


def check_whole(root: Path, number: int) -> str:
    """The attempt's checkpoint in the storage; its folder, empty if there is none. Raises ValueError for a mixture."""
    path = root / str(number) / "checkpoints" / "checkpoint"
    if not path.exists():
        return ""
    manifest = read_manifest(path)
    if not manifest:
        raise ValueError(f"{path} is damaged")
    for name, digest in manifest["files"].items():
        if content_digest(shards_beside(path) / manifest["folder"] / name) != digest:
            raise ValueError(f"{name} is not what {path} names")
    return str(manifest["folder"])


def killed(root: Path, kills: int, epochs: int, chance: random.Random) -> list[str]:
    """What each attempt that lost a node resumed from; then the last one, which nobody disturbs."""
    rows = []
    for number in range(kills + 1):
        is_last = number == kills
        victim, operation = chance.randrange(2), chance.randint(1, MOST_OPERATIONS)
        ends = attempt(root, number, epochs, -1 if is_last else victim, operation)
        log, whole = logged(root, number), check_whole(root, number)
        if "resuming from the checkpoint" not in log and number:
            raise ValueError(f"attempt {number} did not resume:\n{log}")
        resumed = log.partition("resuming from the checkpoint: ")[2].partition("\n")[0]
        rows.append(f"{'none' if is_last else f'node {victim}, operation {operation}'} | {resumed} | {whole or '-'}")
        if ends == [0, 0]:  # so it does without the operations that the kill was to come before
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=12, help="more than the kills leave time for")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        undisturbed, disturbed = Path(place, "undisturbed"), Path(place, "disturbed")
        for root in (undisturbed, disturbed):
            root.mkdir()
        attempt(undisturbed, 0, asked.epochs)
        rows = killed(disturbed, asked.kills, asked.epochs, random.Random(asked.seed))
        print("| killed | resumed from | checkpoint in the storage |\n|---|---|---|")
        print("\n".join(f"| {row} |" for row in rows))
        weights = [torch.load(root / "model.pt", weights_only=True) for root in (undisturbed, disturbed)]
        is_same = same(*weights)
    print(f"{len(rows) - 1} kills in {time.monotonic() - started:.0f} s; the same bits: {'yes' if is_same else 'NO'}")
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
