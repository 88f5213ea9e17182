"""With virtual ranks, a network that is sharded has the bits of one that is not, on any number of ranks."""

import shutil
from dataclasses import replace
from typing import Any

import pytest

from flyte_ddp import training
from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointRefused, EpochFinished, RunStarted, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings
from tests.engine.sharding.sharded_runs import fsdp  # skips where torch cannot shard
from tests.small_training import Unplugged

assert fsdp
HERE = "tests.engine.virtual_ranks.sharded_recipes"
WORKER, TWO_NODES = "flyte_ddp.engine.worker:run", "tests.engine.sharding_targets:train_on_two_nodes"
# The last batch has a sample for one part alone, and an epoch ends with it
SHORT = {"batch_size": 11, "epochs": 4, "virtual_ranks": 4}
CLIPPED = {"batch_size": 45, "virtual_ranks": 4, "validation_fraction": 0.2}


def run(folder, name, nproc=1, sharding="full", watch=lambda event: None, seconds=1e9, target=WORKER, **settings):
    """What a training tells of its steps and evaluations, and its digest: each bit counts. And what it begins with."""
    folder.mkdir(exist_ok=True)
    told: dict[Any, Any] = {}
    began: list[tuple[int, int]] = []

    def listen(event):
        if isinstance(event, StepLogged):
            told[event.epoch, event.step] = event.measures, event.gradient_norm
        if isinstance(event, EpochFinished):
            told[event.epoch] = event.digest, event.test, event.validation
        began.extend([(event.first_epoch, event.first_step)] if isinstance(event, RunStarted) else [])
        assert not isinstance(event, CheckpointRefused)
        watch(event)

    subject = make_subject(find_code(f"{HERE}:{name}"), Settings(**{"log_interval": 1, "epochs": 2, **settings}))
    job = job_in(folder, subject, RunOptions(sharding=sharding, loader_workers=0, checkpoint_seconds=seconds))
    result, *_ = launcher.launch(target, World(nproc, nproc, "gloo", "cpu"), job, 120, listen)
    return {**told, "digest": result.digest}, began[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Of a training that is not sharded, on one rank."""
    return run(tmp_path_factory.mktemp("whole"), "Clipped", 1, "off", **CLIPPED)[0]


@pytest.mark.slow
def test_equal_bits_however_layers_are_called_and_batches_divided(tmp_path):
    expected = run(tmp_path / "1", "Skipping", 1, "off", **SHORT)
    assert run(tmp_path / "3", "Skipping", 3, **SHORT) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Frozen", "Encoded"])
def test_equal_bits_of_frozen_units_and_of_evaluations_of_encoder_layers(tmp_path, name):
    settings = {**SHORT, "epochs": 2}
    assert run(tmp_path / "2", name, 2, **settings) == run(tmp_path / "1", name, 1, "off", **settings)


def test_equal_bits_where_numbers_do_not_fit_their_units(tmp_path):
    settings = {"batch_size": 12, "virtual_ranks": 12, "epochs": 6}
    assert run(tmp_path / "3", "Spiking", 3, **settings) == run(tmp_path / "1", "Spiking", 1, "off", **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "sharding", "target"),
    [(1, "full", WORKER), (3, "full", WORKER), (4, "hybrid", TWO_NODES)],
)
def test_equal_bits_on_one_to_four_ranks_and_on_nodes_with_copies(tmp_path, whole, nproc, sharding, target):
    assert run(tmp_path, "Clipped", nproc, sharding, target=target, **CLIPPED)[0] == whole


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The folder of a training that was cut off on three ranks."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(Unplugged):
        run(folder, "Clipped", 3, watch=unplug, seconds=0, **CLIPPED)
    return folder


def unplug(event):
    if isinstance(event, StepLogged) and (event.epoch, event.step) == (1, 2):
        raise Unplugged


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "sharding"), [(2, "full"), (1, "off")])
def test_cut_off_on_three_ranks_it_goes_on_to_the_same_bits_sharded_or_not(tmp_path, whole, cut, nproc, sharding):
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    resumed, began = run(tmp_path, "Clipped", nproc, sharding, **CLIPPED)
    assert began > (0, 0)
    assert resumed == {key: value for key, value in whole.items() if key in resumed}
    assert resumed["digest"] == whole["digest"]


@pytest.mark.slow
def test_it_goes_on_from_one_that_was_not_sharded(tmp_path, whole):
    with pytest.raises(Unplugged):
        run(tmp_path, "Clipped", 2, "off", watch=unplug, seconds=0, **CLIPPED)
    resumed, began = run(tmp_path, "Clipped", 4, "hybrid", target=TWO_NODES, **CLIPPED)
    assert began > (0, 0)
    assert resumed["digest"] == whole["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), [("Breaking", "loss"), ("BreakingGradient", "gradient")])
def test_what_is_not_finite_is_named(tmp_path, name, what):
    with pytest.raises(RankError, match=f"NonFiniteError: {what} is not finite in epoch 1, step 1, on rank"):
        run(tmp_path, name, 2, virtual_ranks=2)


REFUSED = {
    "InParts": "InParts.micro_batch must be 0 or at least 2, the samples of a part, with virtual_ranks and .* 1",
    "Transposed": r"Transposed.model .*: head.weight must be contiguous and begin .*, got strides \(1, 8\): let",
    "Unaligned": r"Unaligned.model .*: head.weight must be contiguous and begin at a multiple of 64 bytes",
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_other_bits_is_refused_with_a_remedy(tmp_path, name):
    with pytest.raises(InputError, match=REFUSED[name] + ".*, or set options.sharding to off"):
        train(name, tmp_path)


def train(name, output, options=None, **settings):
    given = replace(Settings(virtual_ranks=4), **settings)
    training.train(f"{HERE}:{name}", given, RunOptions(sharding="full", tracking="off", **options or {}), output=output)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"audit_every": 3}, {}, "audit_every must be 0 with virtual_ranks and sharding together, got 3: leave it out"),
        ({"compile": True}, {}, "compile must be False with virtual_ranks and sharding together, got True: leave it"),
        ({}, {"precision": "bfloat16"}, "precision must be float32 with virtual_ranks and sharding .*, got bfloat16"),
    ],
)
def test_options_that_would_have_other_bits_are_refused_with_a_remedy(tmp_path, options, settings, words):
    with pytest.raises(InputError, match=words + ".* set options.sharding to off"):
        train("Skipping", tmp_path, options, **settings)


@pytest.mark.slow
def test_a_unit_that_computes_twice_in_a_pass_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match=r"a unit must be called once in a forward pass, and 1\.inner was .* twice"):
        run(tmp_path, "Twice", 2, virtual_ranks=2)


@pytest.mark.slow
def test_an_optimizer_that_goes_by_the_place_of_a_number_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match=r"Fused.optimizer .*: Adam rounds some numbers .*: leave out fused=True, or"):
        run(tmp_path, "Fused", 2, virtual_ranks=2)


@pytest.mark.slow
def test_nodes_of_one_rank_have_nothing_to_share(tmp_path):
    with pytest.raises(InputError, match="sharding must be full with virtual_ranks on nodes of 1 rank, got hybrid"):
        run(tmp_path, "Skipping", 2, "hybrid", target=TWO_NODES, virtual_ranks=2)
