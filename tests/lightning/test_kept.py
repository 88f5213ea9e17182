"""Files of ModelCheckpoints move with the checkpoint to the logs of the next attempt."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from flyte_ddp.lightning.kept import KeptFiles


@pytest.fixture
def attempt(tmp_path):
    """attempt(name): the files of an attempt whose logs have this name."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    def begin(name):
        (tmp_path / name).mkdir(exist_ok=True)
        job: Any = SimpleNamespace(checkpoint_path=f"{tmp_path}/checkpoint", logs=f"{tmp_path}/{name}")
        return KeptFiles(job)

    yield begin
    distributed.destroy_process_group()


def state(best, *others):
    return {"ModelCheckpoint": {"best_model_path": best, "best_k_models": dict.fromkeys((best, *others), 0.5)}}


def test_they_are_put_into_the_logs_of_the_next_attempt_and_named_there(attempt, tmp_path):
    first = attempt("logs")
    best, elsewhere = tmp_path / "logs" / "models" / "best.ckpt", f"{tmp_path}/logs-of-another/best.ckpt"
    best.parent.mkdir()
    best.write_text("weights")
    callbacks = {**state(str(best), elsewhere), "Other": {"path": str(best)}}
    kept = first.keep(callbacks)
    shutil.rmtree(tmp_path / "logs")
    assert attempt("new").restore(callbacks, kept) == []
    now = tmp_path / "new" / "models" / "best.ckpt"
    assert now.read_text() == "weights"
    assert callbacks == {**state(str(now), elsewhere), "Other": {"path": str(best)}}


def test_those_that_the_newest_checkpoint_does_without_are_dropped_and_named_where_they_are_gone(attempt, tmp_path):
    files = attempt("logs")
    one, other = tmp_path / "logs" / "one.ckpt", tmp_path / "logs" / "other.ckpt"
    for file in (one, other):
        file.write_text(file.stem)
    before, after = files.keep(state(str(one))), files.keep(state(str(other)))
    files.drop_others(after)
    for file in (one, other):
        file.unlink()
    assert files.restore(state(str(other)), after) == []
    assert files.restore(state(str(one)), before) == ["one.ckpt"]
    assert (other.read_text(), one.exists()) == ("other", False)
