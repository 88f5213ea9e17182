"""A sharded training goes on, with sharding and without, and keeps its best evaluations."""

import shutil

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.manifest import shards_beside
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings
from tests.engine.sharding.sharded_runs import HERE, WHOLE, Seen, assert_alike, interrupt, run
from tests.small_training import TWO_HOSTS, Unplugged

EVALUATED = {**WHOLE, "evaluations_per_epoch": 2, "keep_best": 3}


@pytest.mark.slow
def test_a_training_goes_on_with_sharding_and_more_ranks(tmp_path, request):
    """On fewer, test_sharded_checkpoint.py has it."""
    interrupt(tmp_path / "cut", 11, "Undrawn", sharding="off", nproc=2, **WHOLE)
    seen = Seen()
    resumed = run("Undrawn", tmp_path / "cut", nproc=3, watch=seen, **WHOLE)
    assert not seen.refused
    assert min(resumed[0]) > (1, 1)
    request.getfixturevalue("alone")
    assert_alike(resumed, run("Undrawn", tmp_path / "whole", "off", **WHOLE))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """An undisturbed training."""
    return run("Everything", tmp_path_factory.mktemp("full"), nproc=2, **EVALUATED)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The folder of one that was interrupted."""
    folder = tmp_path_factory.mktemp("cut")
    interrupt(folder, 5, nproc=2, **EVALUATED)
    return folder


@pytest.mark.slow
def test_killed_again_it_ends_with_the_same_bits_and_the_best_evaluations_as_without_sharding(full, cut, tmp_path):
    shutil.copytree(cut, tmp_path / "cut")
    seen = Seen(left=12)
    with pytest.raises(Unplugged):
        run("Everything", tmp_path / "cut", watch=seen, seconds=0, nproc=2, **EVALUATED)
    before = seen.reached
    seen.left = 10**9
    _, resumed, weights = run("Everything", tmp_path / "cut", watch=seen, nproc=2, **EVALUATED)
    assert (0, 0) < before <= seen.started
    assert not seen.refused
    assert not shards_beside(tmp_path / "cut" / "checkpoint").exists()
    _, undisturbed, expected = full
    assert all(torch.equal(weights[name], value) for name, value in expected.items())

    off = run("Everything", tmp_path / "off", "off", nproc=2, **EVALUATED)[1]
    assert resumed.kept == undisturbed.kept
    assert [one.file for one in off.kept] == [one.file for one in resumed.kept]
    assert len(resumed.kept) == 3
    for one in resumed.kept:
        files = [result.output / one.file for result in (off, undisturbed, resumed)]
        assert files[1].read_bytes() == files[2].read_bytes()
        plain, sharded = (torch.load(file, weights_only=True) for file in files[:2])
        assert list(plain) == list(sharded)
        assert all(torch.allclose(plain[name], sharded[name], atol=1e-3) for name in plain)
    best = torch.load(resumed.output / resumed.kept[0].file, weights_only=True)
    assert all(torch.equal(best[name], value) for name, value in weights.items())


@pytest.mark.slow
def test_ranks_that_do_not_see_the_checkpoint_get_their_rows_of_it(full, cut, tmp_path):
    shutil.copytree(cut, tmp_path / "cut")
    settings = {**EVALUATED}
    options = RunOptions(sharding="full", loader_workers=0, keep_best=settings.pop("keep_best"))
    job = job_in(
        tmp_path / "cut", make_subject(find_code(f"{HERE}:Everything"), Settings(log_interval=1, **settings)), options
    )
    seen = Seen()
    launcher.launch(TWO_HOSTS, choose_world("gloo", 2, WHOLE["batch_size"]), job, 120, seen)
    assert seen.started > (0, 0)
    found = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in full[2].items())
