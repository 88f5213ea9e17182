"""A later attempt keeps away from a node whose hardware has failed, and trains all the same where it can't."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import (
    V1Affinity,
    V1Container,
    V1NodeAffinity,
    V1NodeSelector,
    V1NodeSelectorRequirement,
    V1NodeSelectorTerm,
    V1PodSpec,
)

from flyte_ddp.attempt import storage_folder
from flyte_ddp.attempt.avoided import (
    FILE,
    add_nodes,
    exclude_nodes,
    find_nodes,
    keep_away,
    set_node_variable,
    with_bad_nodes_listed,
)
from flyte_ddp.attempt.checkpoints import point_to_previous
from flyte_ddp.attempt.platform_training import CommonRecipeTraining
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.attempt.webhook import make_content
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import OddNodes
from flyte_ddp.launch.environment import NODE_VARIABLE
from flyte_ddp.launch.failures import Failure, RankError
from flyte_ddp.settings import RunOptions, TrainingSettings
from tests.attempt.broken_gpu import BROKEN
from tests.attempt.folders import FolderError, Folders, OnFolders

LINE = "to keep new pods away from there, register with DDP_AVOID_HOSTS=node-a"
NO_JOB: Any = None
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.fixture
def on(monkeypatch, tmp_path):
    """A function that goes to a node, and returns the platform of an attempt there; of two that may follow."""
    monkeypatch.setenv("DDP_AVOID_HOURS", "24")
    monkeypatch.setenv("DDP_POD_RETRIES", "2")

    def on(node, attempt=0, root=tmp_path):
        monkeypatch.setenv(NODE_VARIABLE, node)
        return Folders(root, attempt)

    return on


class PointTraining(OnFolders, CommonRecipeTraining[Path, Trained]):
    def __init__(self, platform):
        super().__init__("tests.attempt.broken_gpu:Points")
        self.platform = platform

    def train(self):
        return self.run(TrainingSettings(epochs=3, batch_size=8), RunOptions(nproc=2, tracking="off"))


@pytest.mark.slow
def test_the_next_attempt_leaves_a_node_that_lost_a_gpu_and_the_one_after_it_trains_there_and_warns(on, monkeypatch):
    monkeypatch.setenv(BROKEN, "node-a")
    first = on("node-a")
    with pytest.raises(FolderError) as failed:
        PointTraining(first).train()
    assert str(failed.value).splitlines()[0] == f"rank 1 on node-a: RuntimeError: {ECC}; {LINE}"
    assert LINE in (first.root / "0" / "report.html").read_text(), "the report has it"
    content = make_content(failed.value.failure, first)
    assert content["avoid_hosts"] == ["node-a"]
    assert content["text"].endswith(f"RuntimeError: {ECC}\n{LINE}")
    left = json.loads(Path(first.checkpoint_url(), FILE).read_text())
    (node,) = left.pop("nodes")
    assert left == {"format": 1}
    assert abs(node.pop("time") - time.time()) < 100
    assert node == {"node": "node-a", "reason": ECC, "execution": "the-execution", "url": first.checkpoint_url()}

    with pytest.raises(FolderError, match=rf"left node node-a, which DDP_AVOID_HOURS avoids \({ECC}\): {LINE}") as away:
        PointTraining(on("node-a", 1)).train()
    assert away.value.failure.recoverable

    monkeypatch.delenv(BROKEN)
    trained = PointTraining(on("node-a", 2)).train()
    warning = f"trains on node node-a, which DDP_AVOID_HOURS avoids ({ECC}): {LINE}"
    assert warning in trained.recipe_summary().warnings, "the outputs have it"
    assert LINE in trained.report.read_text()
    assert "resuming from the checkpoint" in (first.root / "2" / "logs" / "console.log").read_text()


class Silent(Folders):
    """A storage that nobody may use."""

    def get(self, url, path):
        raise AssertionError(url)

    def put(self, path, url):
        raise AssertionError(url)


@pytest.mark.parametrize("hours", [None, "0"])
def test_without_being_asked_for_nothing_is_read_or_written(monkeypatch, tmp_path, hours):
    if hours:
        monkeypatch.setenv("DDP_AVOID_HOURS", hours)
    monkeypatch.setenv(NODE_VARIABLE, "node-a")
    platform = Silent(tmp_path, 1)
    start: Any = list
    assert keep_away(platform) == {}
    add_nodes(platform, ["node-a"], ECC)
    assert with_bad_nodes_listed(platform, start) is start


def leaves(platform, **more):
    """Whether a rank leaves; if it trains, it warns."""
    try:
        warnings = keep_away(platform, **more)
    except RecoverableError:
        return True
    assert all(f"trains on node {name}, which DDP_AVOID_HOURS avoids" in said for name, said in warnings.items())
    return False


def test_of_two_ranks_on_a_node_one_leaves_and_no_rank_of_a_later_attempt(on, monkeypatch):
    monkeypatch.setenv("DDP_POD_RETRIES", "3")  # none of these attempts is the last one
    add_nodes(on("node-a"), ["node-a"], ECC)
    assert [leaves(on("node-a", 1)), leaves(on("node-a", 1))] == [True, False]
    add_nodes(on("node-a", 1), ["node-a"], "it has failed once more")
    assert not leaves(on("node-a", 2))
    (warning,) = keep_away(on("node-b", 2)).values()
    assert "avoids (it has failed once more): " in warning


def test_where_all_nodes_are_avoided_the_last_attempt_trains(on):
    add_nodes(on("node-a"), ["node-a", "node-b"], ECC)
    assert leaves(on("node-a", 1))
    assert not leaves(on("node-b", 2)), "of three attempts"


def test_another_node_is_not_left_and_the_list_goes_on_from_attempt_to_attempt(on, monkeypatch):
    add_nodes(on("node-a"), ["node-a"], ECC)
    monkeypatch.setenv("DDP_POD_RETRIES", "9")
    assert not leaves(on("node-b", 1))
    assert leaves(on("node-a", 2))
    point_to_previous(on("node-a", 3))  # and dies at once
    assert not leaves(on("node-a", 4))
    assert [one.node for one in find_nodes(on("node-a", 4), on("node-a", 4).checkpoint_url())] == ["node-a"]


def test_an_execution_that_goes_on_from_another_one_avoids_its_nodes_and_may_leave_each_itself(on, tmp_path):
    before = on("node-a")
    add_nodes(before, ["node-a"], ECC)
    assert leaves(on("node-a", 1))
    other = on("node-a", root=tmp_path / "other")
    other.execution = lambda: ("project/domain/other", "")
    assert leaves(other, resume_from=before.checkpoint_url() + "/")
    assert not leaves(other, resume_from=before.checkpoint_url())


@pytest.mark.parametrize(
    ("hours", "is_avoided"), [(-23, True), (-25, False), (0.1, True), (25, False), (float("nan"), False)]
)
def test_a_node_is_avoided_for_so_many_hours_by_clocks_that_differ(on, hours, is_avoided):
    platform = on("node-a")
    add_nodes(platform, ["node-a"], ECC)
    file = Path(platform.checkpoint_url(), FILE)
    content = json.loads(file.read_text())
    content["nodes"][0]["time"] += hours * 3600
    file.write_text(json.dumps(content))
    assert leaves(on("node-a", 1)) == is_avoided


GOOD = {"node": "node-a", "reason": ECC, "time": 1.0, "execution": "x", "url": "y"}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "7", '{"format": 2, "nodes": []}', '{"nodes": []}', '{"format": 1}', "[" * 100_000,
        json.dumps({"format": 1, "nodes": ["node-a"]}), json.dumps({"format": 1, "nodes": [{"node": "node-a"}]}),
        json.dumps({"format": 1, "nodes": [{**GOOD, "node": 7}]}), json.dumps({"format": 1, "nodes": {**GOOD}}),
        json.dumps({"format": 1, "nodes": [{**GOOD, "node": 'a", "b'}]}),
        json.dumps({"format": 1, "nodes": [{**GOOD, "time": "now"}]}),
        json.dumps({"format": 1, "nodes": [{**GOOD, "more": 1}]}),
    ],
)  # fmt: skip
def test_a_file_that_is_broken_or_from_the_future_is_ignored_with_a_warning(on, monkeypatch, capsys, text):
    monkeypatch.setenv("DDP_POD_RETRIES", "9")
    add_nodes(on("node-a"), ["node-a"], ECC)
    platform = on("node-b", 1)
    point_to_previous(platform)
    Path(platform.checkpoint_url(), FILE).write_text(text)
    assert leaves(on("node-a", 2)), "as the attempt before it says"
    if text:
        assert f"{platform.checkpoint_url()}/{FILE} is ignored, because it is no list of" in capsys.readouterr().err


def test_a_storage_that_fails_and_a_node_without_a_name_are_warnings(on, monkeypatch, capsys):
    add_nodes(on("node-a"), ["node-a"], ECC)
    platform = on("node-a", 1)

    def refuse(path, url):
        raise PermissionError(url)

    platform.put = refuse
    assert not leaves(platform), "what cannot be remembered is not done"
    assert "the nodes to avoid are not in the storage: " in capsys.readouterr().err
    monkeypatch.delenv(NODE_VARIABLE)
    assert keep_away(Folders(platform.root, 1)) == {}
    assert "DDP_AVOID_HOURS has no effect, because the pod's template does not set" in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["get", "put"])
def test_a_list_that_cannot_be_read_or_written_stays_and_no_node_is_said_to_be_avoided(on, monkeypatch, capsys, fails):
    monkeypatch.setattr(storage_folder, "WAITS", ())
    add_nodes(on("node-a"), ["node-a"], ECC)
    capsys.readouterr()
    platform = on("node-a")

    def refuse(*_):
        raise PermissionError("503 Slow Down")

    setattr(platform, fails, refuse)
    add_nodes(platform, ["node-b"], ECC)
    said = capsys.readouterr().err
    assert "the nodes to avoid are not in the storage: " in said
    assert "Avoided for" not in said
    assert listed(on("node-a")) == ["node-a"]


def listed(platform):
    return [one.node for one in find_nodes(platform, platform.checkpoint_url())]


@pytest.mark.parametrize(
    ("rank", "bad_nodes", "writes"),
    [("0", ("node-a", "node-b"), True), ("5", ("node-a", "node-b"), False), ("5", ("node-a",), True), ("0", (), False)],
)
def test_of_many_ranks_the_first_writes_what_all_have_found_and_each_what_it_alone_knows(
    on, monkeypatch, rank, bad_nodes, writes
):
    platform = on("node-a")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "6")

    def fail(job, on_event):
        raise RankError(Failure(int(rank), "node-a", "error", "WrongBitsError", "wrong bits", bad_nodes=bad_nodes))

    with pytest.raises(RankError):
        with_bad_nodes_listed(platform, fail)(NO_JOB, lambda event: None)
    assert listed(platform) == [*bad_nodes] * writes


def test_odd_nodes_are_listed_while_the_training_goes_on(on):
    platform = on("node-a")

    def train(job, on_event):
        on_event(OddNodes(("node-b",), "TFLOPS differ"))
        return []

    assert with_bad_nodes_listed(platform, train)(NO_JOB, lambda event: None) == []
    assert listed(platform) == ["node-b"]


# --- pods ---


def test_a_pod_is_told_its_node_and_forbidden_others_in_addition_to_its_own_affinity():
    pool = V1NodeSelectorRequirement(key="pool", operator="In", values=["h100"])
    terms = [V1NodeSelectorTerm(match_expressions=[pool]), V1NodeSelectorTerm()]
    own = V1NodeAffinity(required_during_scheduling_ignored_during_execution=V1NodeSelector(node_selector_terms=terms))
    for affinity, before in ((None, [0]), (V1Affinity(), [0]), (V1Affinity(node_affinity=own), [1, 0])):
        spec: Any = V1PodSpec(containers=[V1Container(name="sidecar")], affinity=affinity)
        set_node_variable(spec, "primary")
        exclude_nodes(spec, [])
        assert spec.affinity == affinity
        exclude_nodes(spec, ["node-a", "node-b"])
        (variable,) = spec.containers[1].env
        assert (variable.name, variable.value_from.field_ref.field_path) == ("DDP_NODE_NAME", "spec.nodeName")
        node_affinity = spec.affinity.node_affinity
        found = node_affinity.required_during_scheduling_ignored_during_execution.node_selector_terms
        assert [len(term.match_expressions) for term in found] == [count + 1 for count in before]
        rules = [term.match_expressions[-1] for term in found]
        assert {(rule.key, rule.operator, *rule.values) for rule in rules} == {
            ("kubernetes.io/hostname", "NotIn", "node-a", "node-b")
        }
