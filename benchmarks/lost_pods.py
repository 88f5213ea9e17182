"""Takes pods away from trainings on a cluster, and prints what happened to them and to their logs.

CLUSTER_CONFIG=~/.flyte/config.yaml python -m benchmarks.lost_pods VERSION, after make register ARGS="--version VERSION"
with DDP_PROFILE=sandbox and DDP_NPROC_PER_NODE=1. For --only sharded, with the same variables and image, from examples:
DDP_NNODES=2 pyflyte register --version VERSION charlm. The cluster's pods must be containers of the local docker
daemon, with the pods' names. Its storage is read with FLYTE_AWS_ENDPOINT, FLYTE_AWS_ACCESS_KEY_ID and
FLYTE_AWS_SECRET_ACCESS_KEY.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

from flytekit.configuration import Config
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.remote import FlyteRemote

from examples.charlm.settings import Settings
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

PATIENCE_SECONDS = 3600
LOST_SECONDS = 10.0  # of its logs, at most, with a pod

# Makes the kernel kill all other processes of the container first, and then uses up its memory
EXHAUST = """
import glob, os
for path in glob.glob("/proc/[0-9]*/oom_score_adj"):
    if path.split("/")[2] != str(os.getpid()):
        open(path, "w").write("1000")
held = []
while True:
    held.append(b"x" * 10_000_000)
"""
BLOWS = {
    "kill": ["docker", "kill", "POD"],
    "stop": ["docker", "stop", "--time", "30", "POD"],
    "memory": ["docker", "exec", "POD", "python", "-c", EXHAUST],
}


@dataclass
class Victim:
    """A training, and the file in its logs that shows how far it has come."""

    launch_plan: str
    inputs: dict[str, Any]
    log: str
    reached: str


def victims(epochs: int, seed: int) -> dict[str, Victim]:
    """By name; the seed keeps Flyte from remembering an earlier one."""
    hp = Hyperparameters(dataset="digits", epochs=epochs, train_fraction=0.25, seed=seed)
    inputs = {"hp": hp, "options": RunOptions(checkpoint_seconds=2.0)}
    large = Settings(epochs=4 * epochs, width=256, characters=120_000, seed=seed)
    sharded = {"settings": large, "options": RunOptions(sharding="full", checkpoint_seconds=2.0)}
    return {
        "training": Victim("workflows.mnist.pytorch_training_wf", inputs, "console.log", "Epoch 1 of "),
        "two nodes": Victim("workflows.multinode.pytorch_multinode_wf", inputs, "rank-0.log", "Epoch 1 of "),
        "sharded on two nodes": Victim("charlm.multinode.charlm_multinode_wf", sharded, "rank-0.log", "Epoch 1 of "),
    }


class Cluster:
    def __init__(self, version: str, project: str, domain: str, storage: str):
        self.version, self.storage = version, storage
        self.remote = FlyteRemote(Config.auto(os.environ["CLUSTER_CONFIG"]), project, domain)

    def start(self, victim: Victim) -> str:
        plan = self.remote.fetch_launch_plan(name=victim.launch_plan, version=self.version)
        hints = {name: type(value) for name, value in victim.inputs.items()}
        return str(self.remote.execute(plan, inputs=victim.inputs, type_hints=hints).id.name)

    def end_of(self, execution: str) -> str:
        found = self.remote.wait(self.remote.fetch_execution(name=execution), poll_interval=2)
        phase = WorkflowExecutionPhase.enum_to_string(found.closure.phase)
        return phase if found.error is None else f"{phase}: {found.error.message}"

    def logs(self, execution: str, name: str) -> dict[str, str]:
        """The content of the log file of this name of each attempt, by EXECUTION-NODE-ATTEMPT."""
        files = self.remote.file_access.get_filesystem("s3", use_listings_cache=False)
        paths = files.glob(f"{self.storage}/{execution}-*/logs/{name}")
        return {path.split("/")[-3]: files.cat(path).decode() for path in paths}


def strike(cluster: Cluster, victim: Victim, blow: str) -> list[str]:
    """Takes away the pod of a training that is past its first checkpoint; returns the table's cells about it."""
    execution = cluster.start(victim)

    def far_enough() -> str:
        if cluster.remote.fetch_execution(name=execution).is_done:
            raise RuntimeError(f"{execution} ended too early: {cluster.end_of(execution)}")
        return next((name for name, text in cluster.logs(execution, victim.log).items() if victim.reached in text), "")

    attempt = wait_for(far_enough)
    pod = pod_of(attempt)
    time.sleep(random.uniform(0, 5))  # at any time since the last upload
    last_said = datetime.fromisoformat(docker("logs", "--timestamps", "--tail", "1", pod).split()[0][:19])
    subprocess.run([word.replace("POD", pod) for word in BLOWS[blow]], capture_output=True)
    gone = time.monotonic()
    phase = cluster.end_of(execution)
    logs = cluster.logs(execution, victim.log)
    last_kept = datetime.fromisoformat(logs[attempt].splitlines()[-1][:19])
    behind = max(0.0, (last_said - last_kept).total_seconds())
    later = logs.get(f"{attempt[:-1]}1", "")
    resumed = re.findall(r"resuming from the checkpoint: (.*)", later)
    good = phase == "SUCCEEDED" and behind <= LOST_SECONDS and resumed and f"{attempt}/logs" in later
    return [
        phase.split("\n")[0],
        f"{behind:.0f} s",
        resumed[0] if resumed else "afresh",
        f"{time.monotonic() - gone:.0f} s",
        "ok" if good else "NOT OK",
    ]


def pod_of(attempt: str) -> str:
    """The attempt's container; of two nodes, that of the first rank, on which the checkpoints were."""
    pods = docker("ps", "--format", "{{.Names}}", "--filter", f"name={attempt}").split()
    return next((pod for pod in pods if "[rank 0]" in docker("logs", pod)), pods[0])


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def wait_for(found: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing within {PATIENCE_SECONDS} s")
        time.sleep(1)
    return value


def missing() -> str:
    """Why there is no cluster to take pods from; empty if there is one."""
    if not os.environ.get("CLUSTER_CONFIG"):
        return "CLUSTER_CONFIG names no cluster"
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "no docker daemon answers"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="that the workflows were registered under")
    parser.add_argument("--project", default="flytesnacks")
    parser.add_argument("--domain", default="development")
    parser.add_argument("--storage", default="my-s3-bucket/data", help="bucket and folder of Flyte's raw output data")
    parser.add_argument("--epochs", type=int, default=5, help="that have to take longer than a pod's end")
    parser.add_argument("--only", default="", help="part of a row's beginning, such as 'two nodes | kill'")
    asked = parser.parse_args()
    if reason := missing():
        print(f"Skipped: {reason}")
        return
    cluster = Cluster(asked.version, asked.project, asked.domain, asked.storage)
    print("| lost | by | execution | logs lag by | next attempt resumes from | seconds to the end | |")
    print("|---|---|---|---|---|---|---|")
    all_good = True
    for name, blow in product(victims(1, 0), BLOWS):
        if f"{name} | {blow}".startswith(asked.only):
            row = strike(cluster, victims(asked.epochs, random.randrange(2**31))[name], blow)
            all_good &= row[-1] == "ok"
            print("|", " | ".join([name, blow, *row]), "|", flush=True)
    sys.exit(not all_good)


if __name__ == "__main__":
    main()
