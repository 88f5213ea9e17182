"""A sweep over the settings, which trains the worse trials for fewer epochs.

pyflyte run tabular/sweep.py sweep_wf --settings '{"validation_fraction": 0.2}'
"""

from typing import Any

from flytekit import dynamic, task, workflow

from flyte_ddp import RecipeTraining, RunOptions
from flyte_ddp.flyte1.resources import dynamic_resources
from flyte_ddp.sweep.halving import Entrant, TrialResult
from flyte_ddp.sweep.search import Sweep, trials_of
from flyte_ddp.sweep.task import SweepComparison, run_sweep, try_out
from tabular.settings import Settings

WIDTHS = Sweep({"width": [2, 16, 32, 64]}, measure="r2", reduction_factor=4)
training = RecipeTraining("tabular.recipe:Tabular")


@task(**training.arguments())
def try_settings(entrant: Entrant, options: RunOptions) -> TrialResult:
    return try_out(training.run, Settings, entrant, options=options)


@dynamic(**dynamic_resources())
def sweep_settings(sweep: Sweep, settings: Settings, options: RunOptions) -> SweepComparison:
    found: Any = run_sweep(sweep, trials_of(sweep, settings), try_settings, "patients", options=options)
    return found


@workflow
def sweep_wf(
    sweep: Sweep = WIDTHS, settings: Settings = Settings(), options: RunOptions = RunOptions()
) -> SweepComparison:
    return sweep_settings(sweep=sweep, settings=settings, options=options)
