"""The weights of the best evaluations are in the logs, on request, also of a run that was cut off."""

from pathlib import Path

import pytest
import torch

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointFailed, EpochFinished, RunStarted
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train as train_recipe
from tests.commands import same
from tests.engine.probe_recipes import Settings
from tests.engine.test_validation import WAVERING, of
from tests.small_training import TWO_HOSTS, Unplugged, unplug_at

TWICE = {**WAVERING, "epochs": 3, "evaluations_per_epoch": 2, "log_interval": 4}


def weights(file):
    return torch.load(file, weights_only=True)


def kept(trained):
    """The content of each file that a training has kept, by name."""
    files = sorted(trained.folder.glob("best-*"))
    assert [file.name for file in files] == [one.file for one in trained.result.kept]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.slow
def test_the_best_evaluations_are_kept_the_best_first_and_nothing_else_changes(whole):
    without, trained, every = whole(**TWICE), whole(keep_best=3, **TWICE), whole(keep_best=100, **TWICE)
    assert (without.folder / "model.pt").read_bytes() == (trained.folder / "model.pt").read_bytes()
    assert not kept(without)
    epochs = trained.result.epochs
    best = sorted(epochs, key=lambda epoch: -epoch.validation["accuracy"])  # sorted keeps the order of equals
    assert epochs.index(best[0]) == trained.result.chosen_epoch
    told = [(one.epoch, one.measure, one.value) for one in every.result.kept]
    assert told == [(epoch.position, "accuracy", epoch.validation["accuracy"]) for epoch in best]
    assert trained.result.kept == every.result.kept[:3]
    assert kept(trained).items() <= kept(every).items()
    for number, epoch in enumerate(best[:3], 1):
        name = f"best-{number}-epoch-{epoch.position:g}.pt"
        metadata = read_metadata(trained.folder / name)
        assert metadata
        assert metadata.measures == epoch.validation
    assert same(weights(trained.folder / f"best-1-epoch-{best[0].position:g}.pt"), trained.weights)
    last = next(file for file in every.folder.glob("best-*-epoch-3.pt"))
    assert same(weights(last), weights(every.folder / "last.pt"))


def test_a_run_that_was_cut_off_keeps_the_same_files(train, whole):
    expected = whole(keep_best=3, **TWICE)
    cut = {"name": "cut", "checkpoint_seconds": 0, "keep_best": 3, "target": TWO_HOSTS, **TWICE}
    with pytest.raises(Unplugged):
        train(on_event=unplug_at(12, 1), **cut)
    resumed = train(**cut)
    assert kept(resumed) == kept(expected)
    files = [resumed.folder / name for name in ("model.pt", "last.pt", *kept(resumed))]
    tested = [metadata.tested for metadata in map(read_metadata, files) if metadata]
    assert tested == [resumed.result.tested, {}, {}, {}, {}], "an export need not give validation measures on the test"
    beside = {file.name.rpartition("-")[2] for file in (resumed.folder / "checkpoint-best").iterdir()}
    numbers = {f"{round(2 * one.epoch)}.pt" for one in expected.result.kept}
    assert beside == numbers, "and no others: each that is no longer among the best is removed"


@pytest.mark.slow
def test_of_evaluations_before_it_was_asked_for_the_best_is_known(train, whole):
    def unplug(event):
        if isinstance(event, EpochFinished) and event.position == 2:
            raise Unplugged

    expected = whole(keep_best=100, **TWICE)
    with pytest.raises(Unplugged):
        train(name="cut", on_event=unplug, **TWICE)
    resumed = train(name="cut", keep_best=100, **TWICE)
    (started,) = of(resumed, RunStarted)
    at = started.first_epoch + started.first_step / started.steps_per_epoch
    assert at >= 1
    before = [one for one in expected.result.kept if one.epoch <= at]
    known = [one.epoch for one in expected.result.kept if one == before[0] or one.epoch > at]
    assert [one.epoch for one in resumed.result.kept] == known
    ours, theirs = ({one.epoch: run.folder / one.file for one in run.result.kept} for run in (resumed, expected))
    assert all(ours[epoch].read_bytes() == theirs[epoch].read_bytes() for epoch in known)


def test_what_cannot_be_written_is_said_and_training_goes_on(train, whole, tmp_path):
    Path(tmp_path, "training").mkdir()
    Path(tmp_path, "training", "checkpoint-best").write_text("in the way")
    trained = train(1, keep_best=1, **TWICE)
    assert trained.result.kept == []
    failed = of(trained, CheckpointFailed)
    assert failed
    assert failed[0].reason.endswith("epoch 0.5 for keep_best: Not a directory")
    assert same(trained.weights, whole(1, **TWICE).weights)


def test_a_model_that_cannot_be_written_leaves_the_one_before(train, whole, tmp_path):
    epochs = whole(1, **TWICE).result.epochs
    values = [epoch.validation["accuracy"] for epoch in epochs]

    def best(numbers):
        return sorted(numbers, key=lambda number: (-values[number], number))[:2]

    last = max(number for number in range(len(values)) if number in best(range(number + 1)))
    assert last > 1, "so that another model was there before"

    def block(event):
        if isinstance(event, EpochFinished) and event.position == epochs[last - 1].position:
            model, *_ = (tmp_path / "training" / "checkpoint-best").glob("*.pt")
            Path(f"{str(model).rpartition('-')[0]}-{last + 1}.pt").mkdir()

    trained = train(1, keep_best=2, on_event=block, **TWICE)
    expected = best(number for number in range(len(values)) if number != last)
    assert [one.value for one in trained.result.kept] == [values[number] for number in expected]
    assert len(of(trained, CheckpointFailed)) == 1


def test_it_is_refused_where_nothing_chooses(tmp_path):
    options = RunOptions(nproc=1, keep_best=2)
    with pytest.raises(InputError, match=r"RunOptions.keep_best must be 0 without a validation split, got 2: set val"):
        train_recipe("tests.engine.probe_recipes:Sound", Settings(), options, output=tmp_path)
