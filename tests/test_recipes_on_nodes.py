"""A user's own recipe on two nodes, with a network between them."""

import os
import platform
import re
import shutil
import subprocess
from functools import partial

import pytest
import torch

from flyte_ddp.manifest import read_manifest
from flyte_ddp.settings import RunOptions
from scripts.dry_run import build_package
from tests import examples
from tests.commands import ROOT, same
from tests.nodes import lose_one, meeting, weights
from tests.pod import IMAGE, TWO_NODES, is_whole, literal

pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
pytestmark = pytest.mark.slow


@pytest.fixture
def charlm(tmp_path):
    """A function that makes a function that makes a node's pod of the example, from a copy of it."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "charlm", project / "charlm")

    def of_options(options):
        inputs = {"settings": literal(examples.small_settings("charlm")), "options": literal(options)}
        environment = {**TWO_NODES, "PYTHONPATH": str(ROOT)}
        built = build_package(IMAGE, environment=environment, package="charlm", folder=project)
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(project)])}
        task = built.tasks["charlm.multinode.train_charlm_multinode"]
        return partial(meeting(tmp_path), task=task, inputs=inputs, environment=path)

    return of_options


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


def test_a_users_sharded_recipe_that_loses_a_node_goes_on_from_the_files_of_both_as_in_a_plain_call(
    charlm, hosts, tmp_path
):
    """Where a lost pod is started again, the other, whose rank fails with it, waits for it. Flyte's PyTorchJob does not
    start it again: there the next attempt resumes."""
    on_a_host, stored = charlm(RunOptions(sharding="full", checkpoint_seconds=0)), tmp_path / "stored"
    files = []
    here, there = hosts

    def make(name, **more):
        host = here if name == "a" else there
        pod = on_a_host(name, **more)
        pod.command = [*hosts[host], *pod.command]
        port = pod.environment["PET_RDZV_ENDPOINT"].rpartition(":")[2]
        pod.environment["PET_RDZV_ENDPOINT"] = f"{here}:{port}"
        return pod

    def has_files_of_both():
        if is_whole(stored / "checkpoint"):
            files.append(len((read_manifest(stored / "checkpoint") or {}).get("files", ())))
        return bool(files)

    first, lost, done = lose_one(make, stored, has_files_of_both, bool(hosts[here]))
    assert files[0] == 2
    (rank,) = {*re.findall(r"\[rank (\d)\] Logs: ", lost.log)}
    (survivor,) = {"0", "1"} - {rank}
    node = there if hosts[there] else platform.node()
    assert f"rank {rank} on {node} does not answer" in (first.logs / f"rank-{survivor}.log").read_text()
    plain = examples.train_small("charlm", tmp_path / "plain", lambda event: None, sharding="full")
    assert same(weights(done.outputs()), torch.load(plain.model_path, weights_only=True))
