"""The rows of benchmarks.hangs --nodes: agents of torchrun as nodes, with host names of their own if that can be."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from flyte_ddp.launch.failures import Failure

WAYS = ("stop", "sleep", "sleep in the data", "stopped from outside")
WHOLE_NODE = "whole node stopped"
RANKS = 2  # of each node
TIMEOUT_SECONDS = 15.0  # longer than four ranks and two agents take to start on two cores
PATIENCE_SECONDS = 120.0


class NotNamed(Exception):
    """A rank that could still tell has not."""


def hang_on_nodes(way: str, ranks: tuple[int, ...], chance: random.Random, nodes: int) -> tuple[list[Failure], float]:
    """What the ranks that are not stopped fail with, and the seconds from the last step until all have."""
    at = chance.randint(2, 12)
    from_outside = way in (WHOLE_NODE, "stopped from outside")
    fault = {"fault": "none" if from_outside else way, "ranks": ",".join(map(str, ranks)), "step": at}
    settings = json.dumps({"epochs": 1000, "timeout_seconds": TIMEOUT_SECONDS, **fault})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        agents = start(nodes, folder, settings)
        try:
            if from_outside:
                wait_until(folder / f"step-{at}")
                stopped = [pid_of(folder, rank) for rank in ranks]
                if way == WHOLE_NODE:
                    stopped.append(agents[ranks[0] // RANKS].pid)
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
            still = [rank for rank in range(nodes * RANKS) if rank not in ranks or way.startswith("sleep")]
            reports = [wait_until(folder / f"failure-{rank}") for rank in still]
            last_step = max(file.stat().st_mtime for file in folder.glob("step-*"))
            seconds = max(report.stat().st_mtime for report in reports) - last_step
            return [Failure(**json.loads(report.read_text())) for report in reports], seconds
        finally:
            end(agents, folder)


def start(nodes: int, folder: Path, settings: str) -> "list[subprocess.Popen[bytes]]":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(RANKS),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", folder.name,
        "--local-addr", "127.0.0.1", "-m", "benchmarks.hanging_rank", str(folder), settings,
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}
    with open(folder / "log", "w") as log:
        return [
            subprocess.Popen(on_host(node) + command, env=environment, stdout=log, stderr=log, start_new_session=True)
            for node in range(nodes)
        ]


def on_host(node: int) -> list[str]:
    """The start of a command that runs under the node's own host name; empty where that is not allowed."""
    inside = ["unshare", "--uts", "sh", "-c", 'hostname $0 && exec "$@"', f"node-{node}"]
    can = shutil.which("unshare") and not subprocess.run([*inside, "true"], capture_output=True).returncode
    return inside if can else []


def wait_until(file: Path) -> Path:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise NotNamed(f"no {file.name}; the ranks say:\n{(file.parent / 'log').read_text()[-3000:]}")
        time.sleep(0.05)
    return file


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def end(agents: "list[subprocess.Popen[bytes]]", folder: Path) -> None:
    """Agents first, or they would start their ranks again; these are in sessions of their own."""
    for agent in agents:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    for file in folder.glob("pid-*"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)
