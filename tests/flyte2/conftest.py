"""The pods of a JobSet on this machine: the command that the SDK writes, with the variables that the backend sets."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flyte.io import Dir

from flyte_ddp.data.prepared import prepared
from flyte_ddp.settings import RunOptions
from tests.commands import free_port
from tests.flyte2.jobset import CONTAINER, HP, MASTER
from tests.flyte2.pod import Pod2
from tests.object_storage import object_storage


@pytest.fixture(scope="module")
def tasks():
    """The module flyte2/multinode.py, registered for two nodes of one rank."""
    with pytest.MonkeyPatch.context() as here:
        here.setenv("DDP_PROFILE", "sandbox")
        here.setenv("DDP_NPROC_PER_NODE", "1")
        here.delitem(sys.modules, "flyte2.multinode", raising=False)  # registered otherwise
        return importlib.import_module("flyte2.multinode")


@pytest.fixture
def storage(small_data):
    with object_storage() as server:
        for file in small_data.iterdir():
            server.objects[f"bucket/small/{file.name}"] = file.read_bytes()
        yield server


@pytest.fixture
def node(tasks, storage, small_data, tmp_path):
    """A function that makes a pod; all pods of one restart meet at one port."""
    tools = all(map(shutil.which, ("unshare", "taskset")))
    if os.geteuid() != 0 or not tools or subprocess.run([*CONTAINER, "true"]).returncode:
        pytest.skip("the pods find each other by a name of the cluster, which only root can give to this machine")
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.0.2 pod-0 {MASTER}\n127.0.0.3 pod-1\n")
    ports = [free_port() for _ in range(3)]
    data = Dir(path="s3://bucket/small", hash=prepared.read_description(small_data).digest)

    def make(number, restart=0, nodes=2, action="nodes", hp=HP, timeout_seconds=100.0, rendezvous="static", **more):
        jobset = {
            "JOBSET_NAME": "job",
            "POD_NAMESPACE": "here",
            "JOB_COMPLETION_INDEX": str(number),
            "JOBSET_RESTART_ATTEMPT": str(restart),
            "JOBSET_MAX_RESTARTS": str(restart),
            "NNODES": str(nodes),
            "NPROC_PER_NODE": "1",
            "RDZV_BACKEND": rendezvous,
            "MASTER_PORT": str(ports[restart]),
            "TMPDIR": str(tmp_path / f"{action}-{number}-{restart}"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        Path(jobset["TMPDIR"]).mkdir()
        options = RunOptions(
            checkpoint_seconds=0.2, timeout_seconds=timeout_seconds, start_timeout_seconds=timeout_seconds
        )
        values = {"hp": hp, "data": data, "options": options}
        pod = Pod2(tasks.train, values, storage, action=action, environment={**jobset, **more})
        assert pod.command[0] == "clustered"
        hosts = f'hostname pod-{number} && mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
        cores = sorted(os.sched_getaffinity(0))
        core = cores[number % len(cores)]  # one thread for each rank, as if both were on one node
        pod.before = [*CONTAINER, "taskset", "-c", str(core), "sh", "-ec", hosts, "sh"]
        return pod

    return make
