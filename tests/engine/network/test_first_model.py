"""To be sharded, a network is built with its weights on rank 0 alone, and every rank gets its rows of these."""

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.engine.sharding.sharded_state import cut_rows
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.model_files.frozen_base import compute_base_digest
from flyte_ddp.settings import RunOptions
from tests.engine.first_model_recipes import Network
from tests.engine.probe_recipes import Settings

pytest.importorskip("torch.distributed.fsdp")
NEEDED = {
    "Reading": "RuntimeError: Tensor.item() cannot be called on meta tensors",
    "Keeping": "InputError: a tensor of shape (8,) is neither a parameter nor a buffer",
    "Viewing": "RuntimeError: ",
    "Differing": "it has other tensors where they have no values",
}
BASE = "1.weight", "1.bias"
FROM_FILE = Settings(freeze="2", init_leave_out="1,3.bias")


def network(seed):
    torch.manual_seed(seed)
    return Network()


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """What each of two ranks has of the network of each recipe, and of one that starts with the weights of a file."""
    folder = tmp_path_factory.mktemp("placed")
    torch.save(network(seed=7).state_dict(), folder / "model.pt")

    def job(name, settings, init=None):
        code = find_code(f"tests.engine.first_model_recipes:{name}")
        return job_in(folder, make_subject(code, settings, init=init), RunOptions(sharding="full"))

    jobs = {name: job(name, Settings(seed=3)) for name in ("Starting", "OnEachRank", *NEEDED)}
    jobs["init"] = job("Starting", FROM_FILE, folder / "model.pt")
    target = "tests.engine.first_model_targets:place_each"
    ranks = launcher.launch(target, World(2, 2, "gloo", "cpu"), list(jobs.values()), 60, lambda event: None)
    return dict(zip(jobs, zip(*ranks, strict=True), strict=True))


def rows(whole, rank):
    """The rank's rows of parameters, and buffers as they are."""
    found = {}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        own = slice(*cut_rows(len(tensor), rank, 2)) if isinstance(tensor, torch.nn.Parameter) else ...
        found[name] = tensor[own].tolist()
    return found


@pytest.mark.parametrize("name", ["Starting", *NEEDED])
def test_ranks_have_rows_of_what_rank_0_has_built(placed, name):
    whole = network(seed=3)
    if name == "Viewing":
        whole.register_buffer("part", whole.shift[:2])
    for rank, found in enumerate(placed[name]):
        assert found["model"] == found["average"] == rows(whole, rank)
        assert found["tied"]
        assert found["base"] == ({*BASE}, compute_base_digest({name: whole.state_dict()[name] for name in BASE}))
        assert found["trained"] == {"0.weight", "0.bias", "2.weight", "2.bias", "3.bias"}


def test_only_rank_0_builds_it_with_values(placed):
    first, second = placed["Starting"]
    assert not first["without"]
    assert second["without"] == second["model"].keys()
    assert not first["remarks"]


@pytest.mark.parametrize("name", NEEDED)
def test_where_model_needs_values_each_rank_builds_it(placed, name):
    first, second = placed[name]
    assert not second["without"]
    (remark,) = first["remarks"]
    assert f"since model() needs values: {NEEDED[name]}" in remark


def test_ranks_that_build_other_networks_are_refused_alike(placed):
    first, second = placed["OnEachRank"]
    assert "must build the same network on all ranks, but rank 1 and rank 0 have another of_rank_" in first["error"]
    assert first == second


def test_ranks_have_rows_of_the_weights_of_a_file(placed):
    whole, drawn = network(seed=7), network(seed=1)
    for name in (*BASE, "3.bias", "shift"):
        owner, _, last = name.rpartition(".")
        setattr(whole.get_submodule(owner), last, getattr(drawn.get_submodule(owner), last))
    for rank, found in enumerate(placed["init"]):
        assert found["model"] == found["average"] == rows(whole, rank)
        assert found["base"][0] == {*BASE}
        assert found["trained"] == {"0.weight", "0.bias", "3.bias"}
    first, second = placed["init"]
    assert second["without"] == second["model"].keys()
    assert len(first["remarks"]) == 2
