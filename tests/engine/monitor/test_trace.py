"""Two trainings write what their steps compute, and the first step and layer that differ are found."""

import json
from dataclasses import replace

import pytest

from flyte_ddp.engine.monitor.trace import FILE
from flyte_ddp.errors import InputError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train as train_recipe
from flyte_ddp.watch.traces import compare_traces, read_trace
from tests.engine import trace_recipes
from tests.engine.test_own_loop import LOOPS, SMALL
from tests.engine.test_own_loop_by_parts import BY_PARTS, EXACT
from tests.small_training import TWO_HOSTS, Unplugged, unplug_at

RECIPES = trace_recipes.__name__
SHORT = {"batch_size": 48, "virtual_ranks": 3, "seed": 5}  # seven steps
ORDER = ["the batch", "conv1", "conv2", "fc1", "fc2", "the network", "the loss"]


def compared(one, other):
    return compare_traces(read_trace(f"{one.folder}/progress.jsonl"), read_trace(f"{other.folder}/progress.jsonl"))


@pytest.fixture(scope="module")
def usual(whole):
    return whole(1, recipe=f"{RECIPES}:Usual", trace_every=1, name="traced", **SHORT)


def test_traces_have_the_same_bytes_on_any_number_of_ranks_and_change_no_bit(whole, train, usual):
    without = whole(1, recipe=f"{RECIPES}:Usual", name="without", **SHORT)
    assert not (without.folder / FILE).exists()
    three = train(3, recipe=f"{RECIPES}:Usual", trace_every=1, audit_every=2, target=TWO_HOSTS, **SHORT)
    assert three.result.digest == usual.result.digest == without.result.digest
    assert (three.folder / FILE).read_bytes() == (usual.folder / FILE).read_bytes()
    lines = [json.loads(line) for line in (usual.folder / FILE).read_text().split("\n\n")]
    assert [line["step"] for line in lines] == [*range(7)]
    assert [[name for name, _ in part["outputs"]] for part in lines[0]["parts"]] == [ORDER] * 3
    assert [name for name, _ in lines[0]["gradients"]] == [name for name, _ in lines[0]["weights"]]
    assert len({digest for part in lines[0]["parts"] for _, digest in part["outputs"]}) == 3 * len(ORDER) - 3


def test_samples_that_a_rank_borrows_are_no_part_of_it(train):
    """The last of the twenty steps has 14 samples for 16 parts."""
    settings = {"recipe": f"{RECIPES}:Usual", "trace_every": 19, "virtual_ranks": 16, "batch_size": 16}
    one, three = (train(ranks, name=str(ranks), **settings) for ranks in (1, 3))
    assert (one.folder / FILE).read_bytes() == (three.folder / FILE).read_bytes()
    assert [len(step.parts) for step in read_trace(f"{one.folder}/progress.jsonl").values()] == [16, 14]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("InBatch", "in step 4 of epoch 1, whose weights are equal before it: the batch, in part 0, 1, 2 of the batch"),
        ("InOutput", "in step 4 of epoch 1, whose weights are equal before it: the output of conv2, in part 0, 1, 2"),
        ("InLoss", "in step 4 of epoch 1, whose weights are equal before it: the loss, in part 0, 1, 2 of the batch"),
        ("InGradient", "in step 4 of epoch 1, whose outputs are all equal: the gradient of conv2 differs"),
        ("InUpdate", "in the update after step 4 of epoch 1, whose gradients are equal: conv1.weight, conv1.bias"),
    ],
)
def test_what_differs_first_is_named(train, usual, recipe, words):
    changed = train(2, recipe=f"{RECIPES}:{recipe}", trace_every=1, **SHORT)
    assert f"The trainings part {words}" in compared(usual, changed)


def test_between_two_traced_steps_the_interval_is_named(train, usual):
    changed = train(1, recipe=f"{RECIPES}:InOutput", trace_every=2, name="changed", **SHORT)
    assert [*read_trace(f"{changed.folder}/progress.jsonl")] == [0, 2, 4, 6]
    said = compared(usual, changed)
    assert said.startswith("The trainings part between step 3 of epoch 1 and step 5 of epoch 1: conv1.weight, ")
    again = train(1, recipe=f"{RECIPES}:Usual", trace_every=2, name="again", **SHORT)
    assert compared(usual, again) == (
        "All that is traced is equal in the 4 steps that both have, the last step 7 of epoch 1"
    )


def test_a_killed_training_has_each_step_once_more_and_the_same(train, usual):
    settings = {"recipe": f"{RECIPES}:Usual", "trace_every": 1, "name": "killed", "log_interval": 1, **SHORT}
    with pytest.raises(Unplugged):
        train(2, on_event=unplug_at(4), checkpoint_seconds=0, **settings)
    resumed = train(1, **settings)
    assert resumed.events[0].first_step > 0
    assert [*read_trace(f"{resumed.folder}/progress.jsonl")] == [*range(7)]
    assert compared(usual, resumed) == (
        "All that is traced is equal in the 7 steps that both have, the last step 7 of epoch 1"
    )


def test_without_virtual_ranks_and_in_loops_of_ones_own(train, whole):
    for recipe, more in ((LOOPS + "plain", SMALL), (BY_PARTS + "train", EXACT)):
        one, other = (train(2, recipe=recipe, trace_every=3, name=f"{recipe}{n}", **more) for n in range(2))
        untraced = whole(2, recipe=recipe, **more)
        assert one.result.digest == untraced.result.digest
        assert compared(one, other).startswith("All that is traced is equal in the")
        first = read_trace(f"{one.folder}/progress.jsonl")[0]
        names = {name for outputs in first.parts.values() for name, _ in outputs}
        assert names >= {"the batch", "model", "the loss"}
        assert any(name.startswith("model.") for name in names) is (more is EXACT)
        assert first.gradients.keys() <= first.weights.keys()
        changed = train(2, recipe=recipe, trace_every=3, name=f"{recipe}seed", **{**more, "seed": 9})
        assert "step 1 of epoch 1" in compared(one, changed)


def test_clipping_hides_no_layer_whose_gradient_differs(train):
    one, other = (
        train(1, recipe=BY_PARTS + loop, trace_every=3, name=loop, **EXACT) for loop in ("train", "scales_a_gradient")
    )
    assert "the gradient of model.0 differs, and that of no layer after it" in compared(one, other)


def test_it_is_refused_where_it_can_say_nothing(train, usual, tmp_path):
    other = train(1, recipe=f"{RECIPES}:OtherNetwork", trace_every=1, **SHORT)
    assert compared(usual, other) == "The traces are of different networks: only one has the weights fc3.weight"
    (other.folder / FILE).write_text("{}\n")
    with pytest.raises(InputError, match=r"trace.jsonl is not a trace that this version knows: b'\{\}'"):
        compared(usual, other)
    for option, options in (("sharding", RunOptions(sharding="full")), ("compile", RunOptions(compile=True))):
        with pytest.raises(InputError, match=f"trace_every must be 0 with {option}, .* got 2: set options.{option} to"):
            train_recipe(
                f"{RECIPES}:Usual", Hyperparameters(), options=replace(options, trace_every=2), output=tmp_path / option
            )
