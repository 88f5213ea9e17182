"""What saves memory changes nothing else."""

import pytest
import torch

from flyte_ddp.engine.checkpoints.checkpoint import read_checkpoint
from flyte_ddp.errors import InputError
from flyte_ddp.events import RunStarted
from tests.engine import memory_recipes
from tests.engine.memory_recipes import (
    BatchNormElsewhere,
    Block,
    Fixed,
    Hopeless,
    Kept,
    KeptInParts,
    NoSuchLayer,
    OnlyAList,
    Recomputed,
    RecomputedBatchNorm,
    RecomputedInParts,
    Tight,
)
from tests.engine.test_frozen_base import run, weights

pytestmark = pytest.mark.usefixtures("alone")


def same_bits(one, other):
    found, expected = weights(one.model_path), weights(other.model_path)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("recomputed", "kept", "more"), [(Recomputed, Kept, 8), (RecomputedInParts, KeptInParts, 24)])
def test_layers_that_are_computed_again_give_the_same_bits(tmp_path, recomputed, kept, more):
    calls = []
    for recipe, name in ((kept, "kept"), (recomputed, "again")):
        Block.calls = 0
        calls.append((run(recipe, tmp_path / name, epochs=2)[0], Block.calls))
    (first, once), (second, twice) = calls
    assert same_bits(first, second)
    assert twice - once == more  # two blocks, in each part of a step


def test_what_cannot_be_computed_again_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"NoSuchLayer.activation_checkpointing must match names of layers, got 'block.\*': blocks, bl"
    ):
        run(NoSuchLayer, tmp_path)
    with pytest.raises(
        InputError, match=r'activation_checkpointing must name layers, but blocks only lists some: write "blocks.\*"'
    ):
        run(OnlyAList, tmp_path)
    with pytest.raises(
        InputError,
        match=r"must not match 1, as each forward pass changes the buffer 1.0.running_mean, .* nn.GroupNorm",
    ):
        run(RecomputedBatchNorm, tmp_path)
    run(BatchNormElsewhere, tmp_path)


def test_the_parts_of_a_step_are_halved_until_it_fits_and_stay_so(tmp_path, monkeypatch):
    found, events = run(Tight, tmp_path / "found")
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.remarks == ["micro_batch: 2 samples of a rank at a time fit into memory"]
    expected, _ = run(Fixed, tmp_path / "fixed")
    assert same_bits(found, expected)
    final = tmp_path / "found" / "final-checkpoint"
    assert read_checkpoint(final, {})["state"]["micro_batch"] == 2
    monkeypatch.setattr(memory_recipes, "MOST", 8)  # although there is more memory now
    _, events = run(Tight, tmp_path / "on", epochs=2, init=final)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.remarks[1] == "micro_batch: 2 samples of a rank at a time fit into memory"


def test_a_sample_that_is_too_much_is_refused(tmp_path):
    with pytest.raises(InputError, match="a step with a single sample does not fit into memory"):
        run(Hopeless, tmp_path)
