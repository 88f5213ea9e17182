"""A network that is sharded over the ranks is trained as it is otherwise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.digest import weights_digest
from flyte_ddp.engine.job import job_in, subject_of
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import CheckpointRefused, CheckpointWritten, Event, RunStarted, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World, choose_world
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.memory_recipes import Blocks
from tests.engine.probe_recipes import Settings
from tests.engine.sharding_recipes import Digits, Optimized
from tests.examples import train_small, trained
from tests.small_training import TWO_HOSTS

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
    pytest.skip("sharding needs a newer torch", allow_module_level=True)

HERE = "tests.engine.sharding_recipes"
KINDS = "off", "full"
FULL = RunOptions(sharding="full", loader_workers=0)
NAN = {"batch_size": 4, "epochs": 2}


def run(
    name, output, sharding="full", nproc=1, watch=lambda event: None, seconds=1e9, init=None, keep_best=0, **settings
):
    """Losses of each step, the result and its weights."""
    options = RunOptions(
        nproc=nproc, sharding=sharding, tracking="off", loader_workers=0, keep_checkpoint=True,
        checkpoint_seconds=seconds, keep_best=keep_best,
    )  # fmt: skip
    losses = {}

    def listen(event):
        if isinstance(event, StepLogged):
            losses[event.epoch, event.step] = event.measures["loss"]
        watch(event)

    given = Settings(**{"log_interval": 1, **settings})
    try:
        result = train(f"{HERE}:{name}", given, options, output=output, on_event=listen, init=init)
    finally:
        if distributed.is_initialized():  # a rank of this process that fails ends without parting from the others
            distributed.destroy_process_group()
    return losses, result, torch.load(result.model_path, weights_only=True)


def assert_alike(one, other):
    """The same up to rounding: losses, weights and measures."""
    steps = one[0].keys() & other[0].keys()
    assert [one[0][step] for step in steps] == pytest.approx([other[0][step] for step in steps], rel=1e-5)
    assert list(one[2]) == list(other[2])
    size = math.sqrt(sum(float(value.double().square().sum()) for value in other[2].values()))
    gaps = (one[2][key].double() - value.double() for key, value in other[2].items())
    assert math.sqrt(sum(float(gap.square().sum()) for gap in gaps)) < 1e-4 * size
    assert one[1].tested == pytest.approx(other[1].tested, rel=1e-3)


def test_all_that_a_recipe_can_ask_for_is_as_without_sharding(tmp_path):
    settings = {"batch_size": 16, "validation_fraction": 0.2}
    off = run("Everything", tmp_path / "off", "off", **settings)
    full = run("Everything", tmp_path / "full", nproc=2, **settings)
    assert len(full[0]) == len(off[0]) == 16
    assert_alike(full, off)
    assert full[1].best_epoch == off[1].best_epoch == 1
    found, expected = (np.load(result.output / "predictions.npy") for _, result, _ in (full, off))
    assert (found == expected).mean() > 0.9
    assert (full[1].output / "pictures.npz").exists()


@pytest.mark.parametrize(
    ("name", "nproc"),
    [("Sharded", 1), ("Sharded", 2), ("Everything", 3), ("TiedOutside", 2), ("TiedOutside", 3), ("ChannelsLast", 3)],
)
def test_the_digest_is_that_of_the_same_weights_when_whole(tmp_path, name, nproc):
    _, result, weights = run(name, tmp_path, nproc=nproc, batch_size=12)
    assert result.digest == weights_digest(weights) == result.epochs[-1].digest
    assert weights_digest({key: value + 1 for key, value in weights.items()}) != result.digest


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["GroupNormed", "TiedOutside", "Experts"])
def test_what_is_special_is_as_without_sharding(tmp_path, name):
    off, full = (run(name, tmp_path / sharding, sharding, epochs=3) for sharding in KINDS)
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


@pytest.mark.usefixtures("alone")
def test_an_optimizers_state_goes_on_with_the_strides_of_its_weights(tmp_path):
    first = {kind: run("ChannelsLast", tmp_path / kind, kind)[1].output / "final-checkpoint" for kind in KINDS}
    expected = run("ChannelsLast", tmp_path / "on", "off", init=first["off"], epochs=2)
    for before, after in (("full", "off"), ("off", "full"), ("full", "full")):
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
        job_in(tmp_path, subject_of(find_code(f"{HERE}:Plain"), Settings(precision=precision)), FULL)
        for precision in ("float32", "bfloat16")
    ]
    target, world = "tests.engine.sharding_targets:count_exchanged", World(2, 2, "gloo", "cpu")
    (exact, cast), again = launcher.launch(target, world, jobs, 60, lambda event: None)
    assert [exact, cast] == again
    weights = 4 * sum(weight.numel() for weight in Blocks().parameters())
    assert exact == {"gathered": 2 * weights, "reduced": weights, "evaluating": weights}
    assert cast == {**exact, "gathered": exact["gathered"] // 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size"), [("Everything", 16), ("GroupNormed", 12), ("TiedOutside", 8), ("Experts", 3)]
)
def test_it_is_the_same_on_three_ranks(tmp_path, name, batch_size):
    settings = {"batch_size": batch_size}
    off, full = (run(name, tmp_path / kind, kind, nproc=3, **settings) for kind in KINDS)
    assert_alike(full, off)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("name", ["charlm", "finetune_text"])
def test_an_example_is_as_without_sharding(tmp_path, name, nproc):
    losses = []

    def listen(event):
        losses.extend([event.measures["loss"]] if isinstance(event, StepLogged) else [])

    result = train_small(name, tmp_path, listen, nproc, checkpoint_seconds=1e9, sharding="full")
    assert [*losses, result.epochs[-1].test["loss"]] == pytest.approx(trained(name, 1).losses, rel=1e-5)


@pytest.mark.slow
def test_ranks_that_call_other_units_are_told(tmp_path):
    with pytest.raises(RankError, match=r"UnevenShapesError.* not all ranks called .* of Recipe\.fsdp_units"):
        run("ExpertsAlone", tmp_path, nproc=2, batch_size=2)


class Unplugged(Exception):
    pass


def interrupt(output, after, **how):
    """A training whose caller fails once so many checkpoints are written."""
    left = iter(range(after))

    def unplug(event):
        if isinstance(event, CheckpointWritten) and next(left, None) is None:
            raise Unplugged

    with pytest.raises(Unplugged):
        run("Everything", output, watch=unplug, seconds=0, **how)
    assert Path(output, "checkpoint").exists()


WHOLE: dict[str, Any] = {"batch_size": 32, "validation_fraction": 0.2, "epochs": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(("full", 2), ("off", 1)), (("full", 2), ("full", 3)), (("off", 2), ("full", 2))]
)
def test_a_training_goes_on_with_or_without_sharding_on_any_number_of_ranks(tmp_path, before, after):
    whole = run("Everything", tmp_path / "whole", after[0], nproc=after[1], **WHOLE)
    interrupt(tmp_path / "cut", 11, sharding=before[0], nproc=before[1], **WHOLE)
    refused = []

    def watch(event):
        refused.extend([event] if isinstance(event, CheckpointRefused) else [])

    resumed = run("Everything", tmp_path / "cut", after[0], nproc=after[1], watch=watch, **WHOLE)
    assert not refused
    assert min(resumed[0]) > (1, 1)
    assert_alike(resumed, whole)


@pytest.mark.slow
def test_the_best_evaluations_are_kept_as_without_sharding_and_after_a_cut(tmp_path):
    settings = {**WHOLE, "epochs": 4, "evaluations_per_epoch": 2, "keep_best": 3}
    off, full = (run("Everything", tmp_path / kind, kind, nproc=2, **settings)[1] for kind in KINDS)
    interrupt(tmp_path / "cut", 21, nproc=2, **settings)
    cut = run("Everything", tmp_path / "cut", nproc=2, **settings)[1]
    assert cut.kept == full.kept
    assert [one.file for one in off.kept] == [one.file for one in full.kept]
    assert len(full.kept) == 3
    for one in full.kept:
        files = [result.output / one.file for result in (off, full, cut)]
        assert files[1].read_bytes() == files[2].read_bytes()
        plain, sharded = (torch.load(file, weights_only=True) for file in files[:2])
        assert list(plain) == list(sharded)
        assert all(torch.allclose(plain[name], sharded[name], atol=1e-3) for name in plain)
    best, model = (torch.load(path, weights_only=True) for path in (full.output / full.kept[0].file, full.model_path))
    assert all(torch.equal(best[name], value) for name, value in model.items())


@pytest.mark.slow
def test_ranks_that_do_not_see_the_checkpoint_get_their_rows_of_it(tmp_path):
    _, _, expected = run("Everything", tmp_path / "whole", nproc=2, **WHOLE)
    interrupt(tmp_path / "cut", 11, nproc=2, **WHOLE)
    subject = subject_of(find_code(f"{HERE}:Everything"), Settings(log_interval=1, **WHOLE))
    job = job_in(tmp_path / "cut", subject, RunOptions(sharding="full", loader_workers=0))
    events: list[Event] = []
    launcher.launch(TWO_HOSTS, choose_world("gloo", 2, WHOLE["batch_size"]), job, 120, events.append)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.first_step > 1 or started.first_epoch
    found = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


REFUSED = {
    "Unnamed": r'Unnamed.fsdp_units must name layers with sharding, such as \("blocks.\*",\)',
    "NoSuchLayer": r"NoSuchLayer.fsdp_units must match names of layers, got 'block.\*': blocks, bl",
    "AsManyAsFit": "AsManyAsFit.micro_batch must not be -1 with sharding: give a number",
    "Coupled": "Coupled.uses_global_batch must be False with sharding",
    "Scalar": r"Scalar.model .*: scale has no rows to shard: give it the shape \(1,\)",
    "Hooked": "Hooked.model .*: head.weight has a hook on its gradient, which sharding would lose: remove it",
    "Tied": "Tied.fsdp_units must keep tied weights together, but 2.weight is 0.weight, too: name a layer",
    "BatchNorm": "BatchNorm.ghost_batch_size must be set where a network with batch norm is sharded, got 0",
    "Factored": "the optimizer must be one of torch.optim's ASGD, .* treat each number by itself, got Adafactor",
    "Inside": "Inside.forward .*: with sharding, weights are whole only while the network, .* are called",
    "Slopes": "Slopes.forward .*: with sharding, gradients of gradients .*: do without create_graph=True",
    "InPlace": "InPlace.forward .*: with sharding, .* InPlace.fsdp_units names, must not change their inputs in place:",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_with_a_remedy(tmp_path, name):
    remedy = "" if name == "NoSuchLayer" else ".*, or set options.sharding to off"
    with pytest.raises(InputError, match=REFUSED[name] + remedy):
        run(name, tmp_path)


def test_a_tensor_that_outlives_the_try_without_values_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match=r"Cached.model .*has no values: make it in each call, or set options.sh"):
        run("Cached", tmp_path, nproc=2)
