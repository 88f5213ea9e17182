"""A training asks for fewer nodes where as many as wanted are not to be had."""

import asyncio
import json
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import flyte
import pytest
from flyte.errors import (
    ActionAbortedError,
    MaxQueuedTimeExceededError,
    RuntimeSystemError,
    RuntimeUserError,
)

from flyte_ddp.attempt.pod import HANDOVER_VARIABLE, PREVIOUS_VARIABLE
from flyte_ddp.attempt.registration import registration
from flyte_ddp.errors import InputError
from flyte_ddp.flyte2 import platform, sizes
from flyte_ddp.flyte2.handover import FAILURE, PLACE
from flyte_ddp.launch.failures import Failure
from tests.commands import same
from tests.flyte2.jobset import HP
from tests.flyte2.pod import weights

LOST = RuntimeSystemError("JobFailed", "a pod of 8 is gone")
QUEUED = MaxQueuedTimeExceededError("no node for it")


class Cluster:
    """Stands for Flyte where a task calls others: it knows how each action ends, and what it has left by then."""

    def __init__(self, task, *ends):
        self.task, self.ends = task, iter(ends)
        self.objects: dict[str, str] = {}
        self.asked: list[Any] = []
        self.outcome: Any = None

    def __getattr__(self, name):
        return getattr(self.task, name)

    def override(self, **changes):
        task = self.task.override(**changes)
        self.asked.append(task)

        async def run(*inputs):
            error, left = next(self.ends)
            folder = task.env_vars["DDP_HANDOVER"]
            self.objects |= {name if "://" in name else f"{folder}/{name}": text for name, text in left.items()}
            if error:
                raise error
            return "trained"

        return run

    def get(self, url, path):
        if url not in self.objects:
            raise FileNotFoundError(url)
        path.write_text(self.objects[url])

    @property
    def nodes(self):
        return [task.plugin_config.settings.replicas for task in self.asked]

    @property
    def previous(self):
        return [task.env_vars["DDP_PREVIOUS_CHECKPOINT"] for task in self.asked]


@pytest.fixture
def run(tasks, monkeypatch):
    """A function that runs actions which end so, one after the other."""
    monkeypatch.setenv("DDP_NNODES", "8,4,2")
    monkeypatch.setattr(sizes, "PAUSES", flyte.Backoff(timedelta(0)))

    def run(*ends):
        cluster = Cluster(tasks.train, *ends)
        monkeypatch.setattr(platform, "get", cluster.get)
        try:
            cluster.outcome = asyncio.run(sizes._on_available_nodes(cluster, ("hp",), "s3://bucket/actions"))
        except Exception as error:
            cluster.outcome = error
        return cluster

    return run


def failed(recoverable):
    failure = Failure(1, "pod-1", "error", "NonFiniteError", "the loss is not finite", recoverable=recoverable)
    return {FAILURE: json.dumps(asdict(failure))}


def test_it_asks_for_fewer_nodes_after_the_time_in_the_queue_and_for_the_fewest_as_long_as_it_takes(run):
    cluster = run((QUEUED, {}), (QUEUED, {}), (None, {}))
    assert cluster.outcome == "trained"
    assert cluster.nodes == [8, 4, 2]
    limits = [task.timeout.max_queued_time for task in cluster.asked]
    assert limits == [timedelta(minutes=30), timedelta(minutes=30), timedelta(0)]
    for task in cluster.asked:
        custom = task.plugin_config.settings.to_custom_dict()
        assert "maxRestarts" not in custom.get("failurePolicy", {}), "a lost node is asked for anew, in the queue"
        assert task.retries.count == 0
        assert task.timeout.max_runtime == cluster.task.timeout.max_runtime
        assert {**cluster.task.env_vars}.items() <= task.env_vars.items()


def test_after_a_loss_it_goes_on_from_the_checkpoint_with_as_many_nodes_as_there_are_then(run):
    cluster = run((QUEUED, {}), (LOST, {PLACE: "s3://four"}), (QUEUED, {}), (LOST, {}), (None, {}))
    assert cluster.outcome == "trained"
    assert cluster.nodes == [8, 4, 8, 4, 8], "more again, if they are there"
    assert cluster.previous == ["", "", "s3://four", "s3://four", "s3://four"]
    handed = [task.env_vars["DDP_HANDOVER"] for task in cluster.asked]
    assert handed == [f"s3://bucket/actions/{failures}" for failures in (0, 0, 1, 1, 2)]


@pytest.fixture
def bad_node(run, monkeypatch):
    """What an action leaves whose node has lost a GPU."""
    monkeypatch.setenv("DDP_AVOID_HOURS", "24")
    monkeypatch.setattr(platform, "is_local", lambda: False)
    monkeypatch.setattr(platform, "execution", lambda: ("p/d/run", ""))
    found = {"node": "node-7", "reason": "ECC", "time": 1.0, "execution": "p/d/run", "url": "s3://eight"}
    return {PLACE: "s3://eight", **failed(recoverable=True)}, json.dumps({"format": 1, "nodes": [found]})


def excluded(task):
    affinity = task.pod_template.pod_spec.affinity
    if not affinity:
        return []
    (term,) = affinity.node_affinity.required_during_scheduling_ignored_during_execution.node_selector_terms
    return [node for rule in term.match_expressions for node in rule.values]


def test_the_next_action_asks_for_other_nodes_than_one_that_lost_a_gpu(run, bad_node):
    left, listed = bad_node
    cluster = run((LOST, {**left, "s3://eight/avoided-nodes.json": listed}), (QUEUED, {}), (None, {}))
    assert cluster.outcome == "trained"
    assert cluster.nodes == [8, 8, 4]
    assert [excluded(task) for task in cluster.asked] == [[], ["node-7"], ["node-7"]]
    assert excluded(cluster.task) == []


def test_where_there_are_no_other_nodes_it_takes_that_one_again_and_no_pod_leaves_it(run, bad_node, monkeypatch):
    left, listed = bad_node
    written = {}
    monkeypatch.setattr(platform, "put", lambda path, url: written.update({url: path.read_text()}))
    ends = [(LOST, {**left, "s3://eight/avoided-nodes.json": listed}), *[(QUEUED, {})] * 3]
    cluster = run(*ends, (LOST, {}), (None, {}))
    assert cluster.outcome == "trained"
    assert cluster.nodes == [8, 8, 4, 2, 8, 8]
    assert [excluded(task) for task in cluster.asked] == [[], *[["node-7"]] * 3, [], []]
    assert cluster.asked[3].timeout.max_queued_time == timedelta(minutes=30), "not as long as it takes"
    assert written == {"s3://eight/left-node-7-run": "ECC"}


def test_what_would_come_again_ends_it(run):
    final = RuntimeUserError("NonFiniteError", "rank 1 on pod-1: the loss is not finite")
    cluster = run((final, {PLACE: "s3://eight", **failed(recoverable=False)}))
    assert cluster.outcome is final
    assert cluster.nodes == [8]


def test_what_may_not_come_again_is_tried_as_often_as_registered(run):
    cluster = run(*[(LOST, {PLACE: "s3://eight", **failed(recoverable=True)})] * 3)
    assert cluster.outcome is LOST
    assert cluster.nodes == [8] * 3


def test_a_person_who_ends_it_is_obeyed(run):
    cluster = run((ActionAbortedError("by a person"), {}))
    assert isinstance(cluster.outcome, ActionAbortedError)


@pytest.mark.slow
def test_it_goes_on_without_a_lost_node_to_the_bits_of_an_undisturbed_run(node, storage, tasks, whole, monkeypatch):
    """Two nodes, of which one is lost, two more that never come, and one."""
    hp, registered = replace(HP, virtual_ranks=2), {"DDP_NNODES": "2,1"}

    class Nodes(Cluster):
        def override(self, **changes):
            task = self.task.override(**changes)
            self.asked.append(task)
            return partial(self.run, task, f"action-{len(self.asked)}")

        async def run(self, task, action, *inputs):
            pods = [
                node(number, nodes=self.nodes[-1], action=action, hp=hp, **registered, **handed(task))
                for number in range(self.nodes[-1])
            ]
            if len(self.asked) == 2:
                raise QUEUED
            with pods[0].running() as process:
                if len(self.asked) == 1:
                    checkpoint = f"bucket/run/{action}/1/_flytecheckpoints/checkpoint"
                    pods[1].kill_when(lambda objects: checkpoint in objects)
                    assert process.wait(120) == 1
                    raise LOST
                assert process.wait(200) == 0, pods[0].log
                assert "resuming from the checkpoint" in pods[0].log
                return pods[0].outputs()

        def get(self, url, path):
            content = storage.objects.get(url.removeprefix("s3://"))
            self.objects = {url: content.decode()} if content else {}
            super().get(url, path)

    cluster = Nodes(tasks.train)
    monkeypatch.setenv("DDP_NNODES", "2,1")
    monkeypatch.setattr(sizes, "PAUSES", flyte.Backoff(timedelta(0)))
    monkeypatch.setattr(platform, "get", cluster.get)
    outputs = asyncio.run(sizes._on_available_nodes(cluster, (), "s3://bucket/run/main/actions"))
    assert cluster.nodes == [2, 2, 1]
    assert same(weights(storage, outputs), whole(2, epochs=4, virtual_ranks=2).weights)
    assert outputs.summary.world_size == 1
    assert outputs.summary.seconds["lost"] > 0, "of the action before, whose progress is read"


def handed(task):
    return {name: task.env_vars[name] for name in (HANDOVER_VARIABLE, PREVIOUS_VARIABLE)}


def test_a_single_number_of_nodes_is_a_plain_call(monkeypatch):
    async def train(*inputs):
        return inputs

    monkeypatch.setattr(platform, "is_local", lambda: False)
    assert asyncio.run(sizes.on_available_nodes(train, 1, 2)) == (1, 2)


@pytest.mark.parametrize(
    ("nnodes", "expected"),
    [("4", [4]), ("8,4,2", [8, 4, 2]), ("1,2", [2, 1]), ("2:8", [8, 4, 2]), ("3:8", [8, 4, 3]), ("2:7", [7, 3, 2])],
)
def test_numbers_of_nodes(monkeypatch, nnodes, expected):
    monkeypatch.setenv("DDP_NNODES", nnodes)
    assert registration().node_sizes == expected
    assert registration().node_range == (expected[-1], expected[0])


@pytest.mark.parametrize("nnodes", ["1", "0", "", "4:2", "2:", "2,", "many", "2:4:8", "-2", "1,1", "2,4:8", "9" * 5000])
def test_what_is_no_number_of_nodes(monkeypatch, nnodes):
    monkeypatch.setenv("DDP_NNODES", nnodes)
    with pytest.raises(InputError, match="DDP_NNODES must be a number of at least 2, MIN:MAX, or several numbers"):
        _ = registration().node_sizes
