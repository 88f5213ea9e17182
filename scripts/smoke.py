"""A run of every workflow with small inputs on a cluster, after registering all: make smoke IMAGE=… CLUSTER_CONFIG=…

Workflows with cached tasks run twice. The exit status is 0 if all runs succeeded and every second run came from the
cache.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from flyteidl.admin.node_execution_pb2 import NodeExecution, NodeExecutionListRequest
from flyteidl.admin.task_execution_pb2 import TaskExecution, TaskExecutionListRequest
from flyteidl.core.catalog_pb2 import CatalogCacheStatus
from flyteidl.core.execution_pb2 import WorkflowExecution
from flytekit.clients.raw import RawSynchronousFlyteClient
from flytekit.configuration import Config
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.remote import FlyteRemote
from flytekit.types.file import PythonPickledFile

from flyte_ddp.attempt.registration import registration
from flyte_ddp.errors import InputError
from flyte_ddp.export.settings import ClassifierExport
from flyte_ddp.inference.shards import InferenceOptions
from flyte_ddp.recipes.hyperparameters import (
    CIFAR10Hyperparameters,
    FashionMNISTHyperparameters,
    FolderHyperparameters,
    Hyperparameters,
)
from flyte_ddp.sweep.search import Sweep
from scripts.register import register

POLL_SECONDS = 2
# Run after these trainings, with their models: without one, they would train with their defaults, as inference_wf does
MODEL_OF = {
    "workflows.export.export_wf": "workflows.mnist.pytorch_training_wf",
    "workflows.export.export_folder_wf": "workflows.image_folder.image_folder_wf",
}
Model = PythonPickledFile | None
HIT = CatalogCacheStatus.CACHE_HIT
ENDED = (WorkflowExecution.SUCCEEDED, WorkflowExecution.FAILED, WorkflowExecution.ABORTED, WorkflowExecution.TIMED_OUT)


def small_inputs(seed: int) -> dict[str, dict[str, Any]]:
    """Return inputs with which each workflow takes seconds, on data in the image; a new seed avoids cache hits."""
    short: dict[str, Any] = {"epochs": 1, "train_fraction": 0.04}
    digits = {"dataset": "digits", "seed": seed, **short}
    mnist, cifar10 = Hyperparameters(**digits), CIFAR10Hyperparameters(**digits)
    return {
        "workflows.mnist.pytorch_training_wf": {"hp": mnist},
        "workflows.fashion_mnist.fashion_mnist_wf": {"hp": FashionMNISTHyperparameters(**digits)},
        "workflows.cifar10.cifar10_wf": {"hp": cifar10},
        "workflows.gpus.training_on_gpus_wf": {
            "gpus": registration().training_gpus,
            "hp": Hyperparameters(**{**digits, "batch_size": 64}),  # else it would have the first one's cache key
        },
        "workflows.multinode.pytorch_multinode_wf": {"hp": mnist},
        "workflows.multinode.cifar10_multinode_wf": {"hp": cifar10},
        "workflows.image_folder.image_folder_wf": {"hp": FolderHyperparameters(seed=seed, **short)},
        "workflows.export.export_wf": {"options": ClassifierExport(dataset="digits")},
        "workflows.export.export_folder_wf": {},
        "workflows.inference.inference_wf": {"options": InferenceOptions(dataset="digits", shards=2)},
        # A folder in the pod, which vanishes with it: writing to a real place is not tried
        "workflows.promote.promote_wf": {"place": "/var/tmp/promoted", "hp": mnist},
        "workflows.promote.roll_back_wf": {"place": "/var/tmp/promoted"},
        "workflows.sweep.sweep_wf": {
            "sweep": Sweep(values={"learning_rate": [0.03, 0.1]}, reduction_factor=2),
            "hp": Hyperparameters(**{**digits, "batch_size": 256, "epochs": 2}),
        },
    }


class Run(NamedTuple):
    """The outcome of an execution; cached has the statuses of its cached tasks."""

    workflow: str
    execution: str
    phase: str
    seconds: float
    pods: int
    cached: list[int]
    error: str

    @property
    def remembered(self) -> bool:
        return all(status == HIT for status in self.cached)


class Cluster:
    """The cluster on which registered workflows run."""

    def __init__(self, config: str, project: str, domain: str):
        self.remote = FlyteRemote(Config.auto(config), project, domain)

    def run_all(self, inputs: dict[str, dict[str, Any]], version: str, minutes: float) -> list[Run]:
        """Start all at once and wait for them, for `minutes` at most; terminate what still runs then, or on Ctrl-C."""
        running: dict[str, Any] = {}
        ended: list[Run] = []
        deadline = time.monotonic() + 60 * minutes
        try:
            for workflow, values in inputs.items():
                plan = self.remote.fetch_launch_plan(name=workflow, version=version)
                hints = {name: Model if name == "model_state" else type(value) for name, value in values.items()}
                running[workflow] = self.remote.execute(plan, inputs=values, type_hints=hints)
                print(f"{workflow}: {self.remote.generate_console_url(running[workflow])}", flush=True)
            while running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                for workflow in list(running):
                    run = self.outcome(workflow, running[workflow].id)
                    if run.phase in map(WorkflowExecution.Phase.Name, ENDED):
                        ended.append(run)
                        del running[workflow]
                        print(f"{workflow}: {run.phase} after {run.seconds:.0f} s", flush=True)
            return ended + [self.outcome(workflow, execution.id) for workflow, execution in running.items()]
        finally:
            for execution in running.values():
                self.remote.terminate(execution, "the smoke run is over")

    def model_of(self, run: Run) -> PythonPickledFile:
        execution = WorkflowExecutionIdentifier(self.remote.default_project, self.remote.default_domain, run.execution)
        outputs = self.remote.client.get_execution_data(execution).full_outputs.literals
        return PythonPickledFile(outputs["model_state"].scalar.blob.uri)

    def outcome(self, workflow: str, execution: WorkflowExecutionIdentifier) -> Run:
        closure = self.remote.client.get_execution(execution).closure
        nodes = self.nodes(execution, "") if closure.phase in ENDED else ()
        counts = [self.count(node) for node in nodes]
        return Run(
            workflow,
            execution.name,
            WorkflowExecution.Phase.Name(closure.phase),
            (closure.duration or timedelta()).total_seconds(),
            sum(pods for pods, _ in counts),
            [status for _, statuses in counts for status in statuses],
            closure.error.message if closure.error else "",
        )

    def nodes(self, execution: WorkflowExecutionIdentifier, parent: str) -> Iterator[NodeExecution]:
        """Yield all nodes, including those in dynamic tasks and sub-workflows."""
        asked = NodeExecutionListRequest(
            workflow_execution_id=execution.to_flyte_idl(), limit=100, unique_parent_id=parent
        )
        while True:
            page = self.remote.client.list_node_executions_paginated(asked)
            for node in page.node_executions:
                yield node
                if node.metadata.is_parent_node:
                    yield from self.nodes(execution, node.id.node_id)
            asked.token = page.token
            if not page.token:
                return

    def count(self, node: NodeExecution) -> tuple[int, list[int]]:
        """Return how many pods a node has had, and the cache statuses of its cached tasks."""
        asked = TaskExecutionListRequest(node_execution_id=node.id, limit=100)
        attempts = RawSynchronousFlyteClient.list_task_executions_paginated(self.remote.client, asked).task_executions
        if node.metadata.is_array:
            items = [item for attempt in attempts for item in attempt.closure.metadata.external_resources]
            pods = sum(item.retry_attempt + 1 for item in items if item.cache_status != HIT)
            statuses = [item.cache_status for item in items]
        else:
            pods, statuses = sum(map(self.replicas, attempts)), [node.closure.task_node_metadata.cache_status]
        return pods, [status for status in statuses if status != CatalogCacheStatus.CACHE_DISABLED]

    def replicas(self, attempt: TaskExecution) -> int:
        return registration().node_range[1] if "multinode_task" in attempt.id.task_id.name else 1


def table(runs: list[Run]) -> str:
    rows = [("workflow", "phase", "seconds", "pods", "cache")]
    for run in runs:
        hits = f"{run.cached.count(HIT)} of {len(run.cached)}" if run.cached else "-"
        rows.append((run.workflow.removeprefix("workflows."), run.phase, f"{run.seconds:.0f}", str(run.pods), hits))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Other arguments go to pyflyte register.", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="the file that names the cluster")
    parser.add_argument("-p", "--project", default="flytesnacks")
    parser.add_argument("-d", "--domain", default="development")
    parser.add_argument("--only", action="append", help="run the workflows whose names contain this")
    parser.add_argument("--skip", action="append", default=[], help="leave out workflows whose names contain this")
    parser.add_argument("--once", action="append", default=[], help="run workflows whose names contain this only once")
    parser.add_argument("--minutes", type=float, default=60, help="after which running workflows are terminated (60)")
    asked, others = parser.parse_known_args()
    only = asked.only or [""]
    try:
        small = small_inputs(seed=int(time.time()))
    except InputError as error:
        sys.exit(error.message)
    for word in (*only, *asked.skip, *asked.once):  # or it would run nothing, and call that a success
        if not any(word in name for name in small):
            known = ", ".join(small)
            parser.error(f"--only, --skip and --once must be in a workflow's name, got {word!r}: there are {known}")
    wanted = {name for name in small if any(w in name for w in only) and not any(w in name for w in asked.skip)}
    if not wanted:
        parser.error("--skip leaves out all that --only names")
    target = ["--project", asked.project, "--domain", asked.domain]
    version = time.strftime("smoke-%Y%m%d-%H%M%S", time.gmtime())
    registered = register(asked.config, [*others, *target, "--version", version])
    if not registered.complete:
        sys.exit(1)
    chosen = {name: small[name] for name in registered.workflows if name in wanted}
    cluster = Cluster(asked.config, asked.project, asked.domain)
    later = {name: training for name, training in MODEL_OF.items() if {name, training} <= set(chosen)}
    first = cluster.run_all({name: chosen[name] for name in chosen if name not in later}, version, asked.minutes)
    trained = {run.workflow: run for run in first if run.phase == "SUCCEEDED"}
    for name, training in later.items():
        if training in trained:
            chosen[name] = {**chosen[name], "model_state": cluster.model_of(trained[training])}
    first += cluster.run_all({name: chosen[name] for name in later}, version, asked.minutes)
    cached = [run.workflow for run in first if run.cached and run.phase == "SUCCEEDED"]
    again = {name: chosen[name] for name in cached if not any(word in name for word in asked.once)}
    second = cluster.run_all(again, version, asked.minutes)
    print(f"\n{table(first)}\n\nAgain, with cached tasks:\n{table(second)}")
    bad = [run for run in first + second if run.phase != "SUCCEEDED"] + [run for run in second if not run.remembered]
    for run in bad:
        print(f"\n{run.workflow} ({run.execution}): {run.phase}, {run.error or 'not everything came from the cache'}")
    print(f"\n{len(first + second) - len(bad)} of {len(first + second)} runs were as expected, version {version}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
