"""Nodes as processes: the very commands of a PyTorchJob's pods, with the variables that Kubeflow's operator sets."""

import dataclasses
import os
import platform
import re
import shutil
import signal
import subprocess
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
from tests.pod import (
    PATIENCE_SECONDS,
    TWO_NODES,
    literal,
    package,
    run_together,
    small_dataset,
)

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
    return small_dataset(place / "small")


@pytest.fixture(scope="module")
def init(place):
    model = place / "model.pt"
    torch.save(models.build_model(HP.model, 1, (1, 28, 28), 10).state_dict(), model)
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


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with names, addresses and a wire of their own; each is the start of a command that runs on it.

    Where such cannot be had: twice this one, with the loopback device as the wire.
    """
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("ip", "unshare")):
        yield {"127.0.0.1": [], "localhost": []}
        return
    names = [f"ddp{os.getpid()}{letter}" for letter in "ab"]
    (tmp_path / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} {name}\n" for i, name in enumerate(names, 1))
    )
    inside = f'hostname $0 && mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
    wire = [f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}"]
    for i, name in enumerate(names, 1):
        wire += [f"ip -n {name} address add 10.77.0.{i}/24 dev {name}"]
        wire += [f"ip -n {name} link set {device} up" for device in (name, "lo")]
    try:
        for command in [*(f"ip netns add {name}" for name in names), *wire]:
            if subprocess.run(command.split(), capture_output=True).returncode:
                yield {"127.0.0.1": [], "localhost": []}  # root in a container, for instance
                return
        yield {n: ["ip", "netns", "exec", n, "unshare", "--uts", "--mount", "sh", "-c", inside, n] for n in names}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_two_hosts_begin_with_given_weights_and_train_as_one_does(node, one_node, hosts):
    pods = []
    for name, host in hosts.items():
        pods.append(node(name))
        pods[-1].command = [*host, *pods[-1].command]
        port = pods[-1].environment["PET_RDZV_ENDPOINT"].rpartition(":")[2]
        pods[-1].environment["PET_RDZV_ENDPOINT"] = f"{next(iter(hosts))}:{port}"
    assert same(weights(run_together(*pods)), one_node)
    assert any("Starts from 8 of 8 tensors of model.pt" in pod.log for pod in pods)


def rank_of(pod):
    return set(re.findall(r"\[rank (\d)\] Logs: ", pod.log))


def test_a_node_that_stands_still_ends_the_run_within_its_time_and_is_named_with_the_place_of_the_logs(node):
    """Once it moves again, the first node is gone, where all meet: it has to report what is worth a retry, too."""
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
