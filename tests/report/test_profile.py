"""Profiles of a real training, in the forms that Perfetto and TensorBoard open."""

import json
import pickle

from flyte_ddp.engine.monitor.profile import ACTIVE
from flyte_ddp.events import RunStarted


def test_each_rank_leaves_a_trace(recorded):
    folder = recorded.info.logs / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "operators.json", "rank0.pt.trace.json", "rank1.pt.trace.json",
    ]  # fmt: skip
    for rank in (0, 1):
        trace = json.loads((folder / f"rank{rank}.pt.trace.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum(name.startswith("ProfilerStep#") and event.get("ph") == "X" for name, event in zip(
            names, trace["traceEvents"], strict=True)) >= ACTIVE  # fmt: skip
        assert "aten::convolution_backward" in names
        assert any("allreduce" in name for name in names), "what ranks wait for belongs to the picture"


def test_operators_come_most_expensive_first(recorded):
    content = json.loads((recorded.info.logs / "profile" / "operators.json").read_text())
    spent = [operator["self_cpu_us"] for operator in content["operators"]]
    assert content["steps"] == ACTIVE
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > 0


def test_recording_left_nothing_unpicklable(recorded, recorded_file):
    info, events = pickle.loads(recorded_file.read_bytes())
    assert info == recorded.info
    assert [event for event in events if isinstance(event, RunStarted)] == recorded.of(RunStarted)
