"""Nodes as processes: the very commands of a PyTorchJob's pods, with the variables that Kubeflow's operator sets."""

import dataclasses
import os
import platform
import re
import signal
from typing import Any

import pytest
import torch
from flyteidl.core.errors_pb2 import ContainerError
from flytekit.types.file import FlyteFile

from flyte_ddp.recipes import models
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.commands import same
from tests.nodes import listens, meeting, weights
from tests.pod import MIDDLE, PATIENCE_SECONDS, TWO_NODES, literal, package, run_together, small_dataset

pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
pytestmark = pytest.mark.slow

OPTIONS = RunOptions(checkpoint_seconds=0.4)
SETTINGS: dict[str, Any] = {"epochs": 4, "batch_size": 50, "learning_rate": 0.02, "precision": "float32", "threads": 1}
HP = Hyperparameters(**SETTINGS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def small(place):
    return small_dataset(place / "small", MIDDLE)


@pytest.fixture(scope="module")
def init(place):
    model = place / "model.pt"
    torch.save(models.build_model(HP.model, 1, (1, 16, 16), 10).state_dict(), model)
    return literal(FlyteFile(str(model), remote_path=False), FlyteFile | None)


@pytest.fixture(scope="module")
def one_node(whole, place, small, init):
    """The weights of a plain call."""
    return whole(2, data=place / "small", init=place / "model.pt", **SETTINGS).weights


@pytest.fixture
def node(small, init, tmp_path):
    """A function that makes a node's pod of a training of MNIST."""
    make, task = meeting(tmp_path), package(**TWO_NODES).tasks["workflows.multinode.pytorch_multinode_task"]

    def of_mnist(name, checkpoints=None, hp=HP, options=OPTIONS):
        inputs = {"hp": literal(hp), "data": small, "options": literal(options), "init": init}
        return make(name, task, inputs, checkpoints)

    return of_mnist


def test_two_nodes_begin_with_given_weights_and_train_as_one_does(node, one_node):
    pods = node("a"), node("b")
    assert same(weights(run_together(*pods)), one_node)
    assert any("Starts from 8 of 8 tensors of model.pt" in pod.log for pod in pods)


def rank_of(pod):
    return set(re.findall(r"\[rank (\d)\] Logs: ", pod.log))


def test_a_node_that_stands_still_ends_the_run_within_its_time_and_is_named_with_the_place_of_the_logs(node):
    """Once the node moves again, the first one is gone, where all meet: it has to report what is worth a retry, too."""
    given = {"hp": dataclasses.replace(HP, epochs=1000), "options": RunOptions(timeout_seconds=10.0)}
    first, second = node("a", **given), node("b", **given)
    with first.running() as process:
        first.wait_until(lambda: listens(first), process)
        with second.running() as other:
            first.wait_until(lambda: "Train Epoch" in first.log + second.log, process)
            os.killpg(other.pid, signal.SIGSTOP)
            process.wait(PATIENCE_SECONDS)
            os.killpg(other.pid, signal.SIGCONT)
            other.wait(PATIENCE_SECONDS)
    assert second.error.error.kind == ContainerError.RECOVERABLE, second.log
    _, _, reported, logs, *_ = second.error.error.message.splitlines()
    assert f" on {platform.node()}: " in reported or f"node {platform.node()}: " in reported
    assert logs.strip() == f"Logs: {second.logs}"
    (hanging,) = rank_of(second)
    error = first.error.error
    assert error.kind == ContainerError.RECOVERABLE, first.log
    said = f"rank {hanging} on {platform.node()}: Hang: no step within timeout_seconds (10); the others wait in gloo:"
    assert said in error.message
    assert f"Logs: {first.logs}" in [line.strip() for line in error.message.splitlines()]
    assert all(f"[rank {rank}] Logs: {pod.logs}" in pod.log for pod in (first, second) for rank in rank_of(pod))
    assert "the stacks of all ranks follow" in error.message
    assert not list(first.logs.glob("*restart*")), "the agent would wait for that of the other node"
