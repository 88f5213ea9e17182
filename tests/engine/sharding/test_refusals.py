"""What cannot be sharded is refused, each in a sentence with its remedy."""

import pytest

from flyte_ddp.errors import InputError
from tests.engine.sharding.sharded_runs import run

REFUSED = {
    "Unnamed": r'Unnamed.fsdp_units must name layers with sharding, such as \("blocks.\*",\)',
    "NoSuchLayer": r"NoSuchLayer.fsdp_units must match names of layers, got 'block.\*': blocks, bl",
    "AsManyAsFit": "AsManyAsFit.micro_batch must not be -1 with sharding: give a number",
    "Coupled": r"options.sharding must be off for Coupled, which calls all_gather\(\): leave it out",
    "Scalar": r"Scalar.model .*: scale has no rows to shard: give it the shape \(1,\)",
    "Hooked": "Hooked.model .*: head.weight has a hook on its gradient, which sharding would lose: remove it",
    "Tied": "Tied.fsdp_units must keep tied weights together, but 2.weight is 0.weight, too: name a layer",
    "Factored": "the optimizer must be one of torch.optim's ASGD, .* treat each number by itself, got Adafactor",
    "Inside": "Inside.forward .*: with sharding, weights are whole only while the network, .* are called",
    "Slopes": "Slopes.forward .*: with sharding, gradients of gradients .*: do without create_graph=True",
    "ExpertsAlone": r"ExpertsAlone.forward .*: with sharding it must call .* not so call 1.experts.\d: name a layer",
    "Followed": r"Followed.forward .*: with sharding it must leave frozen weights .*changes 1.teacher.bias, 1.tea",
    "InPlace": "InPlace.forward .*: with sharding, .* InPlace.fsdp_units names, must not change their inputs in place:",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_with_a_remedy(tmp_path, name):
    remedy = "" if name in ("Coupled", "NoSuchLayer") else ".*, or set options.sharding to off"
    with pytest.raises(InputError, match=REFUSED[name] + remedy):
        run(name, tmp_path)


def test_a_tensor_that_outlives_the_try_without_values_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match=r"Cached.model .*has no values: make it in each call, or set options.sh"):
        run("Cached", tmp_path, nproc=2)
