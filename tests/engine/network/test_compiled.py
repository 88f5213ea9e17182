"""A network that torch.compile compiles is trained as it is otherwise: by another backend than for GPUs."""

import shutil

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.engine.network.compiled import check_device
from flyte_ddp.errors import InputError
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings

TARGETS = "tests.engine.compiled_targets"


def test_it_is_refused_without_a_gpu_or_what_compiles_for_it(monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"options\.compile must be false without a GPU"):
        train("tests.engine.sharding_recipes:Digits", Settings(), RunOptions(nproc=1, compile=True), output=tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(InputError, match="install gcc in the image"):
        check_device(torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sharding", "ranks", "size", "least"),
    [
        ("sharding_recipes:Everything", "full", 2, 16, 1),
        ("compiled_targets:Numbered", "off", 1, 12, 12),
        ("compiled_targets:Whole", "off", 2, 8, 3),
    ],
)
def test_it_computes_the_same_numbers(recipe, sharding, ranks, size, least, tmp_path):
    """Everything draws in each layer, which it computes again, and has an average; an epoch's last batch is short."""
    from torch.distributed.fsdp import FSDPModule

    if sharding == "full" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("sharding needs a newer torch")
    results = []
    for is_compiled in (False, True):
        folder = tmp_path / str(is_compiled)
        folder.mkdir()
        subject = make_subject(find_code(f"tests.engine.{recipe}"), Settings(batch_size=size, epochs=2))
        job = job_in(folder, subject, RunOptions(sharding=sharding, compile=is_compiled, loader_workers=0))
        world = World(ranks, ranks, "gloo", "cpu")
        results.append(launcher.launch(f"{TARGETS}:count_compiled", world, job, 120, lambda event: None)[0])
    (plain, *none), (compiled, before, pieces) = results
    assert none == [0, 0]
    assert before >= least
    # Once of some eighty times, why is not known, a step of a sharded network had one more compiled
    assert pieces - before <= (sharding == "full"), "a step must not wait for what is compiled"
    assert compiled.epochs[-1].train == pytest.approx(plain.epochs[-1].train, rel=1e-5)
    assert compiled.tested == pytest.approx(plain.tested, rel=1e-4)


@pytest.mark.slow
def test_by_virtual_ranks_it_computes_the_same_bits_on_any_number_of_ranks(tmp_path):
    """Parts have 2 or 3 samples, so that some ranks meet both sizes, and one of them first."""
    digests = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        settings = Settings(batch_size=10, epochs=1, virtual_ranks=4)
        job = job_in(folder, make_subject(find_code(f"{TARGETS}:OneStep"), settings), RunOptions(compile=True))
        result, before, pieces = launcher.launch(
            f"{TARGETS}:count_compiled", World(ranks, ranks, "gloo", "cpu"), job, 120, lambda event: None
        )[0]
        assert pieces == before > 0
        digests.append(result.epochs[-1].digest)
    assert len(set(digests)) == 1


def test_by_virtual_ranks_samples_of_different_lengths_are_refused(tmp_path):
    subject = make_subject(
        find_code("tests.engine.length_recipes:Varied"), Settings(batch_size=4, epochs=1, virtual_ranks=2)
    )
    job = job_in(tmp_path, subject, RunOptions(compile=True))
    with pytest.raises(InputError, match=r"options\.compile must be false with virtual_ranks and samples of different"):
        launcher.launch(f"{TARGETS}:count_compiled", World(1, 1, "gloo", "cpu"), job, 120, lambda event: None)


def test_batch_norm_of_a_single_sample_is_refused(tmp_path):
    """The last batch of twelve samples has two, for four parts."""
    settings = Settings(batch_size=10, epochs=1, virtual_ranks=4)
    job = job_in(tmp_path, make_subject(find_code(f"{TARGETS}:Whole"), settings), RunOptions(compile=True))
    with pytest.raises(InputError, match=r"batch norm sees a part of one sample, .* choose batch_size so that"):
        launcher.launch(f"{TARGETS}:count_compiled", World(1, 1, "gloo", "cpu"), job, 120, lambda event: None)
