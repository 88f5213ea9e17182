"""A rank under Lightning that is alone, in the test's own process: the bits of its resumes within an epoch."""

import shutil
from typing import Any

import pytest

from flyte_ddp.events import CheckpointWritten, RunStarted, StepLogged
from flyte_ddp.lightning.rank import run
from tests.commands import same
from tests.lightning.project import of, settings, train


@pytest.mark.parametrize(
    ("module", "callbacks"), [("OfAllLoaders", ""), ("AddingUp", ""), ("EachEpoch", "counting"), ("FineTuned", "")]
)
def test_a_resume_within_an_epoch_has_the_bits_of_an_undisturbed_training(project, tmp_path, module, callbacks):
    few = settings(epochs=2, log_interval=4, limit_train_batches=5)

    def copy(event):
        if isinstance(event, CheckpointWritten) and (event.epoch, event.step) == (1, 3):
            (tmp_path / "resumed").mkdir()
            shutil.copy(tmp_path / "whole" / "checkpoint", tmp_path / "resumed")

    of_it: Any = {"module": f"numerals.variants:{module}", "here": run, "checkpoint_seconds": 0}
    if callbacks:
        of_it["callbacks"] = f"numerals.variants:{callbacks}"
    whole = train(tmp_path / "whole", few, on_event=copy, **of_it)
    resumed = train(tmp_path / "resumed", few, **of_it)
    (started,) = of(RunStarted, resumed)
    assert (started.first_epoch, started.first_step) == (1, 3)
    assert same(resumed.weights, whole.weights)
    assert [(one.train, one.validation) for one in resumed.result.epochs] == [
        (one.train, one.validation) for one in whole.result.epochs
    ]
    assert of(StepLogged, resumed)[-1].measures == of(StepLogged, whole)[-1].measures
