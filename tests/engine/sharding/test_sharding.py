"""A network that is sharded over the ranks is trained as it is otherwise."""

import numpy as np
import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.digest import weights_digest
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.errors import NonFiniteError
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.settings import RunOptions
from tests.engine.memory_recipes import Blocks
from tests.engine.probe_recipes import Settings
from tests.engine.sharding.sharded_runs import HERE, KINDS, assert_alike, run
from tests.engine.sharding_recipes import Digits, Optimized

FULL = RunOptions(sharding="full", loader_workers=0)


@pytest.mark.slow
def test_all_that_a_recipe_can_ask_for_is_as_without_sharding(tmp_path):
    settings = {"batch_size": 16, "validation_fraction": 0.2}
    off = run("Everything", tmp_path / "off", "off", nproc=3, **settings)
    full = run("Everything", tmp_path / "full", nproc=3, **settings)
    assert len(full[0]) == len(off[0]) == 8
    assert_alike(full, off)
    assert full[1].best_epoch == off[1].best_epoch == 1
    found, expected = (np.load(result.output / "predictions.npy") for _, result, _ in (full, off))
    assert (found == expected).mean() > 0.9
    assert (full[1].output / "pictures.npz").exists()
    check_digest(*full[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nproc"), [("TiedOutside", 2), ("ChannelsLast", 3)])
def test_the_digest_is_that_of_the_same_weights_when_whole(tmp_path, name, nproc):
    check_digest(*run(name, tmp_path, nproc=nproc, batch_size=12)[1:])


def check_digest(result, weights):
    assert result.digest == weights_digest(weights) == result.epochs[-1].digest
    assert weights_digest({key: value + 1 for key, value in weights.items()}) != result.digest


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "batch_size"), [("Normed", 8), ("TiedOutside", 8), ("Experts", 3)])
def test_what_is_special_is_as_without_sharding(tmp_path, name, batch_size):
    off, full = (run(name, tmp_path / sharding, sharding, epochs=3, batch_size=batch_size) for sharding in KINDS)
    assert_alike(full, off)


@pytest.mark.usefixtures("alone")
def test_it_starts_from_weights_and_goes_on_from_a_checkpoint_as_without_sharding(tmp_path):
    _, first, before = run("Sharded", tmp_path / "first", epochs=2, stop_after=1)
    on = {
        kind: run("Sharded", tmp_path / f"on {kind}", kind, init=first.output / "final-checkpoint", epochs=2)
        for kind in KINDS
    }
    assert_alike(on["full"], on["off"])
    frozen = {"freeze": "blocks.0", "init": first.model_path}
    tuned = {kind: run("Sharded", tmp_path / f"tuned {kind}", kind, **frozen) for kind in KINDS}
    assert_alike(tuned["full"], tuned["off"])
    kept = {name for name, value in before.items() if torch.equal(tuned["full"][2][name], value)}
    assert kept == {name for name in before if name.startswith("blocks.0.")}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_an_optimizers_state_goes_on_with_the_strides_of_its_weights(tmp_path):
    first = {kind: run("ChannelsLast", tmp_path / kind, kind)[1].output / "final-checkpoint" for kind in KINDS}
    expected = run("ChannelsLast", tmp_path / "on", "off", init=first["off"], epochs=2)
    for before, after in (("full", "off"), ("off", "full")):
        on = run("ChannelsLast", tmp_path / before / after, after, init=first[before], epochs=2)
        assert_alike(on, expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "more"), [("Adagrad", {"fused": True}), ("NAdam", {}), ("Rprop", {}), ("SGD", {"fused": True})]
)
def test_other_optimizers_are_as_without_sharding(tmp_path, monkeypatch, kind, more):
    monkeypatch.setattr(Optimized, "kind", getattr(torch.optim, kind))
    monkeypatch.setattr(Optimized, "more", more)
    off, full = (run("Optimized", tmp_path / sharding, sharding, epochs=3) for sharding in KINDS)
    assert_alike(full, off)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "where"),
    [("Breaking", "loss .* in epoch 1, step 1, on rank 0"), ("BreakingGradient", "gradient .* step 1, on rank 0")],
)
def test_what_is_not_finite_is_named(tmp_path, name, where):
    for sharding in KINDS:
        with pytest.raises(NonFiniteError, match=where):
            run(name, tmp_path, sharding)


@pytest.mark.usefixtures("alone")
def test_in_bfloat16_it_computes_with_the_same_numbers_and_evaluates_in_float32(tmp_path):
    """Its norms and its positions are of float32 in both."""
    settings = {"batch_size": 64, "precision": "bfloat16"}
    off, full = (run("Digits", tmp_path / kind, kind, **settings) for kind in KINDS)
    assert [*full[0].values()] == pytest.approx([*off[0].values()], rel=1e-6)
    assert_alike(full, off)
    recipe, batch = Digits(None), Digits(None).data("test")
    exact = recipe.measure(Digits.load_model(full[1].model_path, Settings())(batch[0]), batch)["loss"].mean()
    assert full[1].tested["loss"] == pytest.approx(exact.item(), rel=1e-6)
    assert list(off[0].values()) != list(run("Digits", tmp_path / "float32", "off", batch_size=64)[0].values())


@pytest.mark.usefixtures("alone")
def test_in_bfloat16_layers_that_compute_with_their_weights_themselves_have_the_same_numbers(tmp_path):
    off, full = (run("OwnLayers", tmp_path / kind, kind, precision="bfloat16") for kind in KINDS)
    assert [*full[0].values()] == pytest.approx([*off[0].values()], rel=1e-6)


def test_in_bfloat16_ranks_exchange_half_of_the_weights_bytes(tmp_path):
    """In a step's forward and backward pass, but not in an evaluation; gradients are of float32."""
    jobs = [
        job_in(tmp_path, make_subject(find_code(f"{HERE}:Plain"), Settings(precision=precision)), FULL)
        for precision in ("float32", "bfloat16")
    ]
    target, world = "tests.engine.sharding_targets:count_exchanged", World(2, 2, "gloo", "cpu")
    (exact, cast), again = launcher.launch(target, world, jobs, 60, lambda event: None)
    assert [exact, cast] == again
    weights = 4 * sum(weight.numel() for weight in Blocks().parameters())
    assert exact == {"gathered": 2 * weights, "reduced": weights, "evaluating": weights}
    assert cast == {**exact, "gathered": exact["gathered"] // 2}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch_size"), [("TiedOutside", 8), ("Experts", 3)])
def test_it_is_the_same_on_three_ranks(tmp_path, name, batch_size):
    settings = {"batch_size": batch_size}
    off, full = (run(name, tmp_path / kind, kind, nproc=3, **settings) for kind in KINDS)
    assert_alike(full, off)
