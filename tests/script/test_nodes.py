"""Scripts on many nodes: what each rank gets, and whose checkpoints are mirrored."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, free_port
from tests.pod import TWO_NODES
from tests.script.test_mirror import Attempt, files_in
from tests.script.test_task import project  # noqa: F401 a fixture

SEEN = """
import json, os, pathlib, sys, threading
place, rank = pathlib.Path(os.environ["DDP_CHECKPOINT_DIR"]), os.environ["RANK"]
assert "TORCHELASTIC_ERROR_FILE" not in os.environ
names = ["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]
seen = {name: os.environ[name] for name in names} | {"found": sorted(path.name for path in place.iterdir())}
pathlib.Path(sys.argv[1], rank).write_text(json.dumps(seen))
while len(os.listdir(sys.argv[1])) < 4:
    threading.Event().wait(0.05)
(place / f"of-{rank}").write_text("whole")
with open(os.environ["DDP_EVENTS"], "a") as events:
    events.write(json.dumps({"step": 1, "rank": int(rank)}))
print("rank", rank, "is here")
"""


def start_node(root: Path, node: int, port: int, script: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A node's process, which torchrun would start for its first rank, in the second attempt."""
    torchruns = {
        "RANK": 2 * node, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": node,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_ERROR_FILE": root / "error", "DDP_NNODES": 2, "DDP_NPROC_PER_NODE": 2, "PYTHONPATH": ROOT,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.script.attempt", str(root), "1", "2", str(script), *arguments]
    environment = {**os.environ, **{name: str(value) for name, value in torchruns.items()}}
    with open(root / f"log-{node}", "w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def test_each_node_begins_with_the_mirrored_checkpoints_and_those_of_the_first_are_mirrored(tmp_path):
    earlier = Attempt(tmp_path)
    earlier.write(before="whole")
    earlier.upload()
    (tmp_path / "seen").mkdir()
    (tmp_path / "train.py").write_text(SEEN)
    port = free_port()
    nodes = [start_node(tmp_path, node, port, tmp_path / "train.py", f"{tmp_path}/seen") for node in (0, 1)]
    outputs, others = (node.communicate()[0] for node in nodes)
    logs = [(tmp_path / f"log-{node}").read_text() for node in (0, 1)]
    assert [node.returncode for node in nodes] == [0, 0], logs
    seen = [json.loads((tmp_path / "seen" / str(rank)).read_text()) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in seen] == ["0", "1", "0", "1"]
    assert [one["GROUP_RANK"] for one in seen] == ["0", "0", "1", "1"]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_PORT"]) for one in seen} == {("4", "2", str(port))}
    assert [one["found"] for one in seen] == [["before"]] * 4
    assert json.loads(others) is None, "the first node has the outputs"
    assert json.loads(outputs)["figures"] == {"rank": 0.0}
    assert {*files_in(Attempt(tmp_path, 2).folder)} == {"before", "of-0", "of-1"}, "not what the second node has left"
    assert "[rank 3] rank 3 is here" in logs[1]
    assert "[rank 3]" not in logs[0]
    assert "on 2 hosts" in logs[0]


def test_the_guides_task_of_many_nodes_is_one_of_torchruns(project, monkeypatch):  # noqa: F811
    pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
    place, _ = project
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    task = importlib.import_module("gpt_nodes.workflow").train_gpt
    assert (task.task_type, task.task_config.nnodes, task.task_config.nproc_per_node) == ("pytorch", "2:2", 1)
