"""Nodes as processes: the very commands of a PyTorchJob's pods, with the variables that Kubeflow's operator sets."""

import dataclasses
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
from functools import partial
from importlib import import_module

import pytest
import torch
from flyteidl.core.errors_pb2 import ContainerError
from flytekit.types.file import FlyteFile

from flyte_ddp.lightning.settings import LightningOptions
from flyte_ddp.manifest import read_manifest
from flyte_ddp.recipes import models
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from scripts.dry_run import build_package
from tests import examples
from tests.commands import ROOT, free_port, same
from tests.lightning.project import train as train_lightning
from tests.lightning.project import write_project
from tests.pod import (
    IMAGE,
    PATIENCE_SECONDS,
    TWO_NODES,
    Pod,
    end,
    is_whole,
    literal,
    package,
    run_together,
    small_dataset,
)

pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
pytestmark = pytest.mark.slow

HP = Hyperparameters(epochs=4, batch_size=50, learning_rate=0.02, precision="float32")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def tasks():
    return package(**TWO_NODES).tasks


@pytest.fixture(scope="module")
def small(place):
    return small_dataset(place / "small")


@pytest.fixture(scope="module")
def init(place):
    model = place / "model.pt"
    torch.save(models.build_model(HP.model, 1, (1, 28, 28), 10).state_dict(), model)
    return literal(FlyteFile(str(model), remote_path=False), FlyteFile | None)


@pytest.fixture(scope="module")
def one_node(tasks, place, small, init):
    inputs = {"hp": literal(HP), "data": small, "options": literal(RunOptions(nproc=2)), "init": init}
    return weights(Pod(tasks["workflows.mnist.pytorch_mnist_task"], inputs, place / "one", cores=2).run())


@pytest.fixture
def node(tasks, small, init, tmp_path):
    """A function that makes a node's pod; all of a test's nodes meet."""
    kubeflow = {
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "FLYTE_INTERNAL_EXECUTION_ID": tmp_path.name,
    }

    ours = tasks["workflows.multinode.pytorch_multinode_task"]

    def make(name, checkpoints=None, hp=HP, task=ours, inputs=None, environment=None):
        if inputs is None:
            options = literal(RunOptions(checkpoint_seconds=0.4))
            inputs = {"hp": literal(hp), "data": small, "options": options, "init": init}
        environment = {**kubeflow, "TMPDIR": str(tmp_path / f"{name}-tmp"), **(environment or {})}
        (tmp_path / f"{name}-tmp").mkdir()
        return Pod(task, inputs, tmp_path / name, environment=environment, checkpoints=checkpoints, cores=1)

    return make


def weights(outputs):
    return torch.load(outputs["model_state"].scalar.blob.uri, weights_only=True)


def listens(pod):
    """Whether the first node has made the meeting place; as in a PyTorchJob, that is always the same one."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(pod.environment["PET_RDZV_ENDPOINT"].rpartition(":")[2]))) == 0


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


def test_lost_node_comes_back_and_all_go_on(node, one_node):
    """Where a lost pod is started again, the others, whose ranks fail with it, wait for it. Flyte's PyTorchJob does not
    start it again: there the next attempt resumes."""
    first = node("a")
    with first.running() as process:
        first.wait_until(lambda: listens(first), process)
        second = node("b", checkpoints=first.checkpoints)
        second.kill_when(lambda: any(first.checkpoints.glob("checkpoint")))
        again = node("b-again", checkpoints=first.checkpoints)
        with again.running() as other:
            assert (process.wait(PATIENCE_SECONDS), other.wait(PATIENCE_SECONDS)) == (0, 0), first.log + again.log
    done, other = (first, again) if first.outputs_file.exists() else (again, first)
    assert "resuming from the checkpoint" in done.log
    assert same(weights(done.outputs()), one_node)
    (lost,) = rank_of(second)
    (survivor,) = {"0", "1"} - {lost}
    assert f"rank {lost} on {platform.node()} does not answer" in (first.logs / f"rank-{survivor}.log").read_text()


def rank_of(pod):
    return set(re.findall(r"\[rank (\d)\] Logs: ", pod.log))


def test_a_node_that_stands_still_ends_the_run_within_its_time_and_is_named(node, small, init):
    options = literal(RunOptions(timeout_seconds=20.0))
    inputs = {"hp": literal(dataclasses.replace(HP, epochs=1000)), "data": small, "options": options, "init": init}
    first, second = node("a", inputs=inputs), node("b", inputs=inputs)
    with first.running() as process:
        first.wait_until(lambda: listens(first), process)
        with second.running() as other:
            first.wait_until(lambda: "Train Epoch" in first.log + second.log, process)
            os.killpg(other.pid, signal.SIGSTOP)
            process.wait(PATIENCE_SECONDS)
    (hanging,) = rank_of(second)
    error = first.error.error
    assert error.kind == ContainerError.RECOVERABLE, first.log
    said = f"rank {hanging} on {platform.node()}: Hang: no step within timeout_seconds (20); the others wait in gloo:"
    assert said in error.message
    assert "the stacks of all ranks follow" in error.message
    assert not list(first.logs.glob("*restart*")), "the agent would wait for that of the other node"


def test_loss_of_the_meeting_place_is_worth_a_retry(node):
    first, second = node("a"), node("b")
    with first.running() as process:
        first.wait_until(lambda: listens(first), process)
        with second.running() as other:
            first.wait_until(lambda: "Train Epoch" in first.log + second.log, process)
            end(process)
            other.wait(PATIENCE_SECONDS)
    assert second.error.error.kind == ContainerError.RECOVERABLE, second.log
    _, _, reported, logs, *_ = second.error.error.message.splitlines()
    assert f" on {platform.node()}: " in reported or f"node {platform.node()}: " in reported
    assert logs.strip() == f"Logs: {second.logs}"


def test_failure_begins_with_its_rank_and_says_where_the_logs_of_each_rank_are(node):
    pods = [node(name, hp=dataclasses.replace(HP, learning_rate=1e30)) for name in ("a", "b")]
    processes = [pod.start() for pod in pods]
    try:
        for process in processes:
            process.wait(PATIENCE_SECONDS)
    finally:
        end(*processes)
    causes = []
    for pod in pods:
        (own,) = pod.logs.glob("rank-*.log")  # no start again, which would end alike
        assert "NonFiniteError" in own.read_text()
        assert f"[rank {own.name[5]}] Logs: {pod.logs}" in pod.log
        _, _, first, second, *_ = pod.error.error.message.splitlines()
        if f"TaskError: rank {own.name[5]} on {platform.node()}: NonFiniteError: loss is not finite" in first:
            causes.append(second.strip() == f"Logs: {pod.logs}")
    assert causes, "of the other node the meeting place may be gone before it can tell"
    assert all(causes)


OWN = """
from charlm.settings import Settings
from flytekit import task

from flyte_ddp.settings import RunOptions
from flyte_ddp.tasks.multinode import multinode
from flyte_ddp.tasks.recipe import RecipeOutputs, RecipeTraining

training = RecipeTraining("charlm.recipe:CharLM")


@task(**multinode(training.arguments()))
def train_on_nodes(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run_as_rank(settings, options)
"""


UNDER_LIGHTNING = """
from flytekit import task

from flyte_ddp import LightningOptions, LightningTraining, RecipeOutputs
from flyte_ddp.tasks.multinode import multinode
from numerals.settings import Settings

training = LightningTraining("numerals.model:LitNumerals", data="numerals.model:Numerals")


@task(**multinode(training.arguments()))
def train_on_nodes(settings: Settings, options: LightningOptions) -> RecipeOutputs:
    return training.run_as_rank(settings, options)
"""


def pods_of(node, project, package, settings, options):
    """A function that makes a node's pod of a training by train_on_nodes of the package's nodes.py."""
    environment = {**TWO_NODES, "PYTHONPATH": str(ROOT)}
    built = build_package(IMAGE, environment=environment, package=package, place=project)
    inputs = {"settings": literal(settings), "options": literal(options)}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(project)])}
    return partial(node, task=built.tasks[f"{package}.nodes.train_on_nodes"], inputs=inputs, environment=path)


def on_two_nodes(*training):
    make = pods_of(*training)
    return weights(run_together(*map(make, ("first", "second"))))


@pytest.fixture
def charlm(tmp_path):
    """The folder of a project with the example."""
    shutil.copytree(ROOT / "examples" / "charlm", tmp_path / "project" / "charlm")
    (tmp_path / "project" / "charlm" / "nodes.py").write_text(OWN)
    return tmp_path / "project"


def test_a_users_recipe_on_two_nodes_as_in_a_plain_call(node, charlm):
    found = on_two_nodes(node, charlm, "charlm", examples.small_settings("charlm"), RunOptions())
    assert same(found, examples.trained("charlm", 2).weights)


def test_a_sharded_training_that_loses_a_node_goes_on_from_the_files_of_both(node, charlm, tmp_path):
    options = RunOptions(sharding="full", checkpoint_seconds=0)
    make = pods_of(node, charlm, "charlm", examples.small_settings("charlm"), options)
    whole = weights(run_together(*(make(name, checkpoints=tmp_path / "whole") for name in ("first", "second"))))
    stored = tmp_path / "stored" / "checkpoint"
    first = make("a", checkpoints=stored.parent)
    with first.running() as process:
        first.wait_until(lambda: listens(first), process)
        second = make("b", checkpoints=stored.parent)
        second.kill_when(lambda: is_whole(stored))
        manifest = read_manifest(stored)
        assert manifest
        assert len(manifest["files"]) == 2
        again = make("b-again", checkpoints=stored.parent)
        with again.running() as other:
            assert (process.wait(PATIENCE_SECONDS), other.wait(PATIENCE_SECONDS)) == (0, 0), first.log + again.log
    done, other = (first, again) if first.outputs_file.exists() else (again, first)
    assert "resuming from the checkpoint" in done.log, done.log
    assert same(weights(done.outputs()), whole)


def test_a_lightningmodule_on_two_nodes_as_on_one(node, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    write_project(tmp_path / "project")
    (tmp_path / "project" / "numerals" / "nodes.py").write_text(UNDER_LIGHTNING)
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    settings = import_module("numerals.settings").Settings(epochs=2)
    found = on_two_nodes(node, tmp_path / "project", "numerals", settings, LightningOptions())
    assert same(found, train_lightning(tmp_path / "one", settings).weights)
