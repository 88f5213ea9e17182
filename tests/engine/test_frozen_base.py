"""What model() freezes is in no checkpoint and no result, and comes back from model() alone."""

import random
import shutil

import numpy as np
import pytest
import torch
from torch import distributed, nn

from flyte_ddp.engine.average import Average
from flyte_ddp.engine.own_loop.kept_parts import arrangement, load
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointRefused, EpochFinished, RunStarted
from flyte_ddp.model_files.frozen_base import FrozenBase, compute_base_digest, frozen_weights
from flyte_ddp.model_files.model_metadata import read_required_metadata
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import base_recipes
from tests.engine.base_recipes import (
    Averaged,
    Based,
    CopiedLate,
    FrozenBfloat16,
    FrozenFloat16,
    Lora,
    Permuted,
    Taught,
    TaughtFast,
    TaughtLate,
    Tied,
    TrainedBfloat16,
    TrainedFloat64,
)
from tests.engine.probe_recipes import Settings, Sound

pytestmark = pytest.mark.usefixtures("alone")


def run(recipe, output, init=None, **settings):
    """The result of a training in this process, and its events."""
    events: list[object] = []
    options = RunOptions(keep_checkpoint=True)
    try:
        return train(recipe, Settings(**settings), options, output=output, on_event=events.append, init=init), events
    finally:
        if distributed.is_initialized():  # a rank that fails ends without parting from the others
            distributed.destroy_process_group()


def weights(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("recipe", [Based, Averaged, Tied, FrozenBfloat16])
def test_what_model_freezes_is_in_no_file_and_loading_puts_both_together(tmp_path, recipe):
    result, _ = run(recipe, tmp_path)
    torch.manual_seed(Settings().seed)
    whole = recipe(Settings()).model()
    base = frozen_weights(whole)
    assert base
    rest = whole.state_dict().keys() - base.keys()
    saved = weights(tmp_path / "final-checkpoint")["state"]
    assert weights(result.model_path).keys() == saved["model"].keys() == rest
    assert saved["base"] == read_required_metadata(result.model_path, "").base_digest == compute_base_digest(base)
    if recipe is Averaged:
        assert (
            saved["average"].keys() == saved["choice"]["weights"].keys() == weights(tmp_path / "last.pt").keys() == rest
        )
    torch.manual_seed(99)  # loading draws the base anew
    before = torch.get_rng_state()
    loaded = recipe.load_model(result.model_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in base.items())
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in weights(result.model_path).items())


def test_what_model_draws_by_numpy_and_python_is_drawn_alike_when_a_file_is_loaded(tmp_path):
    result, _ = run(Permuted, tmp_path)
    before = str((random.getstate(), np.random.get_state()))
    loaded = Permuted.load_model(result.model_path)
    assert str((random.getstate(), np.random.get_state())) == before
    samples = Permuted(Settings()).data("test")
    loss = (loaded(samples) - samples).square().mean().item()
    assert loss == pytest.approx(result.tested["loss"])


def test_a_frozen_teacher_that_follows_what_is_trained_is_in_the_files(tmp_path):
    result, _ = run(Taught, tmp_path / "whole")
    assert weights(result.model_path).keys() == {
        "1.student.weight", "1.student.bias", "1.teacher.weight", "1.teacher.bias"
    }  # fmt: skip
    torch.manual_seed(Settings().seed)
    first, loaded = Taught(Settings()).model(), Taught.load_model(result.model_path)
    assert torch.equal(loaded.state_dict()["0.weight"], first.state_dict()["0.weight"])
    assert not torch.equal(loaded.state_dict()["1.teacher.weight"], first.state_dict()["1.teacher.weight"])


@pytest.mark.parametrize("recipe", [TaughtLate, CopiedLate])
def test_a_frozen_weight_that_begins_to_move_after_the_trial_is_named_before_a_checkpoint_lacks_it(tmp_path, recipe):
    with pytest.raises(
        InputError, match=r"frozen weights \(.*1.teacher.weight.*\) must change from the first step on or"
    ):
        run(recipe, tmp_path)


def test_a_teacher_is_looked_for_with_weights_that_have_hardly_moved(tmp_path):
    result, _ = run(TaughtFast, tmp_path)
    assert "1.teacher.weight" in weights(result.model_path)


@pytest.mark.parametrize("recipe", [Based, Averaged, Taught])
def test_a_training_resumes_and_goes_on_with_the_same_bits(tmp_path, recipe):
    expected, _ = run(recipe, tmp_path / "whole", epochs=3)
    run(recipe, tmp_path / "first", epochs=3, stop_after=1)
    final = tmp_path / "first" / "final-checkpoint"
    result, events = run(recipe, tmp_path / "on", epochs=3, init=final)
    assert len([event for event in events if isinstance(event, EpochFinished)]) == 2
    again = tmp_path / "on" / "checkpoint"  # of a training that has ended: nothing is left to do
    shutil.copy(tmp_path / "on" / "final-checkpoint", again)
    resumed, events = run(recipe, tmp_path / "on", epochs=3, init=final)
    assert not [event for event in events if isinstance(event, (CheckpointRefused, EpochFinished))]
    for one in (result, resumed):
        assert one.tested == expected.tested
        found, wanted = weights(one.model_path), weights(expected.model_path)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_layer_that_a_continuation_freezes_stays_as_it_was_trained_and_not_as_its_average(tmp_path):
    run(Averaged, tmp_path / "first")
    first = weights(tmp_path / "first" / "final-checkpoint")["state"]
    run(Averaged, tmp_path / "on", init=tmp_path / "first" / "final-checkpoint", epochs=2, freeze="3")
    on = weights(tmp_path / "on" / "final-checkpoint")["state"]
    assert not torch.equal(first["average"]["3.weight"], first["model"]["3.weight"])
    assert torch.equal(on["model"]["3.weight"], first["model"]["3.weight"])
    assert torch.equal(on["average"]["3.weight"], first["model"]["3.weight"])


def test_another_base_is_refused_wherever_files_lack_it(tmp_path, monkeypatch):
    result, _ = run(Based, tmp_path)
    shutil.copy(tmp_path / "final-checkpoint", tmp_path / "checkpoint")
    shutil.copy(tmp_path / "final-checkpoint", tmp_path / "theirs")
    shutil.copy(result.model_path, tmp_path / "theirs.pt")
    monkeypatch.setattr(base_recipes, "SHIFT", 1e-6)
    with pytest.raises(InputError, match=r"model_state leaves out 0.0.bias, 0.0.weight, .* and which are others now"):
        Based.load_model(result.model_path)
    with pytest.raises(InputError, match=r"init leaves out 0.0.bias, .*give the settings, data and init of that"):
        run(Based, tmp_path / "other", init=tmp_path / "theirs.pt")
    with pytest.raises(
        InputError, match=r"init: the checkpoint .*theirs belongs to another training: the weights that"
    ):
        run(Based, tmp_path / "other", init=tmp_path / "theirs", epochs=2)
    with pytest.raises(InputError, match=r"there belongs to another training: the weights that model\(\) freezes"):
        run(Based, tmp_path)


def test_a_training_starts_with_the_trained_part_or_with_a_whole_file_that_it_then_keeps(tmp_path):
    first, _ = run(Based, tmp_path / "first")
    _, events = run(Based, tmp_path / "second", init=first.model_path)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.remarks == ["Starts from 11 of 11 tensors of model.pt"]
    whole = {name: value + 1 for name, value in Based.load_model(first.model_path).state_dict().items()}
    torch.save(whole, tmp_path / "whole.pt")
    third, _ = run(Based, tmp_path / "third", init=tmp_path / "whole.pt")
    assert weights(third.model_path).keys() == whole.keys()  # model() would not give the frozen ones again
    assert torch.equal(Based.load_model(third.model_path).state_dict()["0.0.bias"], whole["0.0.bias"])
    fourth, _ = run(Based, tmp_path / "fourth", init=tmp_path / "third" / "final-checkpoint", epochs=2)
    expected, _ = run(Based, tmp_path / "expected", init=tmp_path / "whole.pt", epochs=2)
    assert fourth.digest == expected.digest


def test_frozen_by_a_setting_stays_in_the_file(tmp_path):
    result, _ = run(Sound, tmp_path, freeze="0")
    assert weights(result.model_path).keys() == Sound(Settings()).model().state_dict().keys()
    assert read_required_metadata(result.model_path, "").base_digest == ""


def test_lora_of_a_base_fifty_times_larger_leaves_less_than_a_twentieth_of_it(tmp_path):
    result, _ = run(Lora, tmp_path)
    base = frozen_weights(Lora(Settings()).model())
    size = sum(value.nbytes for value in base.values())
    assert size > 50 * sum(value.nbytes for value in weights(result.model_path).values())
    assert (tmp_path / "final-checkpoint").stat().st_size < size / 20
    assert result.model_path.stat().st_size < size / 20
    loaded = Lora.load_model(result.model_path)
    assert not torch.equal(loaded.state_dict()["base_model.model.2.lora_B.default.weight"], torch.zeros(512, 1))


def test_an_average_shares_what_is_frozen():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    own, averaged = list(model.parameters()), list(Average(model, 0.9).model.parameters())
    assert [one is other for one, other in zip(own, averaged, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            TrainedBfloat16,
            r"Bfloat16\.model .*: 1\.weight is bfloat16, but what is trained must be float32, or small .*float\(\) on",
        ),
        (TrainedFloat64, r"Float64\.model .*: 1\.weight is float64, but what is trained must be float32: call float"),
        (
            FrozenFloat16,
            r"Float16\.model .*: 0\.weight is float16, but what is frozen must be float32 or bfloat16: call",
        ),
    ],
)
def test_weights_of_a_type_that_trains_badly_are_refused(tmp_path, recipe, words):
    with pytest.raises(InputError, match=words):
        run(recipe, tmp_path)


class Versioned(nn.Linear):
    """Takes weights without a version for those of an earlier release, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_what_is_loaded_has_the_versions_of_its_modules():
    model = nn.Sequential(Versioned(2, 2))
    base = FrozenBase(model)
    base.load(model, base.without(model))
    load({"model": model}, {"model": dict(model.state_dict())}, arrangement({"model": model}))
