"""A checkpoint can be read again, whatever a recipe puts into it; one that cannot be is refused with the reason."""

import hashlib
import io
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed

from flyte_ddp.engine.checkpoints.checkpoint import FORMAT, compare_identities, read_checkpoint, write_checkpoint
from flyte_ddp.engine.job import Subject
from flyte_ddp.engine.sharding.sharded_state import Shard
from flyte_ddp.errors import CheckpointError, InputError, RecoverableError
from flyte_ddp.events import CheckpointRefused, EpochFinished
from flyte_ddp.flyte1.recipe import RecipeTraining
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Named, Settings, Sound


class NumpyNumbers(Sound):
    """Its rates and measures are numbers of NumPy."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), np.geomspace(0.1, 0.01, 3)[1])

    def lr_lambda(self, step, steps):
        return np.cos(step / steps)

    def derive(self, measures):
        return {**measures, "perplexity": np.exp(np.float32(measures["loss"]))}


class Marked(Sound):
    """Its optimizer has an object that only running code could restore."""

    def optimizer(self, model):
        return torch.optim.SGD([{"params": model.parameters(), "mark": RunOptions()}], 0.1)


def run(recipe, output):
    """The result of a training in this process, and its events."""
    events: list[object] = []
    options = RunOptions(keep_checkpoint=True)
    return train(recipe, Settings(), options, output=output, on_event=events.append), events


@pytest.mark.usefixtures("alone")
def test_numbers_of_numpy_are_read_again_and_what_does_not_fit_is_trained_anew(tmp_path):
    first, _ = run(NumpyNumbers, tmp_path)
    final, resumed = tmp_path / "final-checkpoint", tmp_path / "checkpoint"
    as_a_task = RecipeTraining(f"{__name__}:NumpyNumbers").subject(Settings(), None)
    content = read_checkpoint(final, as_a_task.identity)
    assert type(content["state"]["progress"]["history"][0]["test"]["perplexity"]) is float

    shutil.copy(final, resumed)
    second, events = run(NumpyNumbers, tmp_path)
    assert not any(isinstance(event, (CheckpointRefused, EpochFinished)) for event in events)
    assert second.tested == first.tested

    del content["state"]["schedule"]  # found only after weights and optimizer have been loaded
    write_checkpoint(resumed, content)
    third, events = run(NumpyNumbers, tmp_path)
    (refused,) = (event.reason for event in events if isinstance(event, CheckpointRefused))
    assert refused == "the checkpoint does not fit this training: KeyError: 'schedule'"
    assert any(isinstance(event, EpochFinished) for event in events)
    assert third.tested == first.tested


@pytest.mark.usefixtures("alone")
def test_what_another_training_has_left_in_the_output_is_lost_by_request_alone(tmp_path):
    def other(**options):
        train(Sound, Settings(seed=2), RunOptions(**options), output=tmp_path, on_event=lambda event: None)

    run(Sound, tmp_path)
    left = tmp_path / "checkpoint"
    shutil.copy(tmp_path / "final-checkpoint", left)
    before = left.read_bytes()
    weights = (tmp_path / "model.pt").read_bytes()
    with pytest.raises(InputError, match=r"its seed was 1, now it is 2: give another output, drop that checkpoint by"):
        other()
    distributed.destroy_process_group()  # which the rank that was refused has left
    assert (left.read_bytes(), (tmp_path / "model.pt").read_bytes()) == (before, weights)
    run(Sound, tmp_path)  # the call that left it
    assert (tmp_path / "model.pt").read_bytes() == weights
    left.write_bytes(before)
    other(resume=False)
    assert (tmp_path / "model.pt").read_bytes() != weights
    assert not left.exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("target", "reason"),
    [("/proc/self/mem", "Input/output error"), ("checkpoint", "Too many levels of symbolic links")],
)
def test_one_that_cannot_be_read_now_is_neither_refused_nor_replaced(tmp_path, target, reason):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.symlink_to(target)  # which fails like a disk that does not answer
    with pytest.raises(RecoverableError, match=f"checkpoint, a file of .* cannot be read: {reason}: try again once"):
        run(Sound, tmp_path)
    assert checkpoint.is_symlink()


@pytest.mark.usefixtures("alone")
def test_what_could_not_be_read_again_is_refused_before_training(tmp_path):
    place = r"state\['optimizer'\]\['param_groups'\]\[0\]\['mark'\], of type RunOptions"
    with pytest.raises(InputError, match=f"a checkpoint cannot hold {place}.*: make it a number"):
        run(Marked, tmp_path)


def test_a_setting_of_any_name_belongs_to_the_identity():
    def training(**settings):
        return Subject("a:Recipe", Named(**settings), code_version="1", dataset="none", data_digest="2")

    first = training()
    for name, value in [*dict.fromkeys(("recipe", "data", "code", "init"), "other").items(), ("settings", {"code": 1})]:
        other = training(**{name: value})
        assert other.key != first.key
        assert [path for path, *_ in compare_identities(first.identity, other.identity)] == [("settings", name)]
    assert [path for path, *_ in compare_identities(first.identity, replace(first, code_version="3").identity)] == [
        ("code",)
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (["format", FORMAT], f"has format list, this version reads {FORMAT}"),
        ({"format": FORMAT}, "has no identity or no state"),
        ({"format": FORMAT, "identity": {}, "state": [1]}, "has no identity or no state"),
        (
            {"format": FORMAT, "identity": {}, "state": {"x": np.float64(1)}},
            r"^cannot be read: it has something else than tensors and plain values in it \(numpy.*scalar\)$",
        ),
    ],
)
def test_content_of_another_form_is_refused_with_the_reason(tmp_path, content, reason):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    (tmp_path / "checkpoint").write_bytes(buffer.getvalue() + hashlib.sha256(buffer.getbuffer()).digest())
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(tmp_path / "checkpoint", {})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.py": "1", "b.py": "3", "c.py": "4"}, r"its code was 'old', now it is 'new' \(b.py, c.py changed\)$"),
        ({"a.py": "1", "b.py": "2"}, r"'new' \(another version of torch or flyte_ddp\)$"),
    ],
)
def test_of_other_code_the_files_that_changed_are_named(tmp_path, files, words):
    content = {"format": FORMAT, "identity": {"code": "old"}, "files": {"a.py": "1", "b.py": "2"}, "state": {}}
    write_checkpoint(tmp_path / "checkpoint", content)
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path / "checkpoint", {"code": "new"}, files)


def test_rows_that_do_not_come_leave_no_draft(tmp_path):
    content = {"weight": Shard(torch.ones(2), torch.Size([4]))}
    with pytest.raises(ValueError, match="process group"):  # nobody is there to send them
        write_checkpoint(tmp_path / "checkpoint", content)
    assert [*tmp_path.iterdir()] == []


def test_it_is_written_and_read_without_a_copy_in_memory(tmp_path):
    path, tensors = tmp_path / "checkpoint", [torch.full((2**21,), float(value)) for value in range(24)]
    before = resource.getrlimit(resource.RLIMIT_DATA)  # which counts what is mapped from a file to be changed, too
    (taken,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    one, file = 2**23, 24 * 2**23
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (int(taken) * 1024 + 3 * one, before[1]))
        write_checkpoint(path, {"identity": {}, "state": {"tensors": tensors}})
        resource.setrlimit(resource.RLIMIT_DATA, (int(taken) * 1024 + 3 * one + file, before[1]))
        again = read_checkpoint(path, {})["state"]["tensors"]
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert all(torch.equal(one, other) for one, other in zip(tensors, again, strict=True))
