"""The trials of a sweep under Flyte 2: one that is lost for good ends no other."""

import asyncio
import json

import pytest
from flyte.errors import RuntimeSystemError, RuntimeUserError

from flyte_ddp.flyte2 import platform
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.flyte2 import run_rungs
from flyte_ddp.sweep.halving import Entrant, TrialResult
from flyte_ddp.sweep.search import Sweep, trials_of


@pytest.mark.parametrize("kind", [RuntimeUserError, RuntimeSystemError])
def test_a_trial_that_has_failed_for_good_ends_no_other(kind):
    async def run(entrant: Entrant) -> TrialResult:
        if (rate := json.loads(entrant.settings)["learning_rate"]) == 0.2:
            raise kind("JobFailed", "its pod is gone")
        return TrialResult({"accuracy": rate})

    sweep = Sweep({"learning_rate": [0.1, 0.2, 0.3]})
    ((first, lost, last),) = asyncio.run(run_rungs(sweep, trials_of(sweep, Hyperparameters()), run))
    assert first
    assert lost
    assert last
    assert (first.failure, lost.failure, last.failure) == ("", "JobFailed: its pod is gone", "")


def test_a_sweep_whose_trials_have_all_failed_ends_in_an_error_of_the_platform():
    async def run(entrant: Entrant) -> TrialResult:
        return TrialResult(failure="diverged")

    sweep = Sweep({"learning_rate": [0.1, 0.2]}, reduction_factor=2)
    trials = trials_of(sweep, Hyperparameters(epochs=2))
    with pytest.raises(platform.FinalError, match=r"^Every trial of the sweep failed:"):
        asyncio.run(run_rungs(sweep, trials, run))
