"""A sharded training goes on, with sharding and without, and keeps its best evaluations."""

import pytest
import torch

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.events import CheckpointRefused, Event, RunStarted
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings
from tests.engine.sharding.sharded_runs import HERE, KINDS, WHOLE, assert_alike, interrupt, run
from tests.small_training import TWO_HOSTS


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(("full", 2), ("full", 3)), (("off", 2), ("full", 2))])
def test_a_training_goes_on_with_or_without_sharding_on_any_number_of_ranks(tmp_path, before, after):
    whole = run("Undrawn", tmp_path / "whole", after[0], nproc=after[1], **WHOLE)
    interrupt(tmp_path / "cut", 11, "Undrawn", sharding=before[0], nproc=before[1], **WHOLE)
    refused = []

    def watch(event):
        refused.extend([event] if isinstance(event, CheckpointRefused) else [])

    resumed = run("Undrawn", tmp_path / "cut", after[0], nproc=after[1], watch=watch, **WHOLE)
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
    subject = make_subject(find_code(f"{HERE}:Everything"), Settings(log_interval=1, **WHOLE))
    job = job_in(tmp_path / "cut", subject, RunOptions(sharding="full", loader_workers=0))
    events: list[Event] = []
    launcher.launch(TWO_HOSTS, choose_world("gloo", 2, WHOLE["batch_size"]), job, 120, events.append)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.first_step > 1 or started.first_epoch
    found = torch.load(tmp_path / "cut" / "model.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
