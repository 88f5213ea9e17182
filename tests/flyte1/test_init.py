"""A task that begins with given weights: a training that is remembered by their content."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests import examples
from tests.commands import pyflyte

WORKFLOW = """
from flytekit import task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.settings import RunOptions
from flyte_ddp.flyte1.data import weights_by_content
from flyte_ddp.flyte1.recipe import RecipeOutputs, RecipeTraining
from tabular.settings import Settings
from tabular.workflow import tabular_wf

training = RecipeTraining("tabular.recipe:Tabular")


@task(**training.arguments())
def tune_tabular(settings: Settings, options: RunOptions, init: FlyteFile) -> RecipeOutputs:
    return training.run(settings, options, init=init)


@workflow
def tune_wf(init: FlyteFile, settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return tune_tabular(settings=settings, options=options, init=weights_by_content(file=init))
"""


def run(project: Path, *arguments: str, status: int = 0) -> "tuple[str, str]":
    done = pyflyte(*arguments, status=status, cwd=project)
    return done.stdout, done.stderr


def output(said: str, name: str) -> Path:
    (found,) = re.findall(rf"\b{name}=([^,)]+)", said)
    return Path(found)


@pytest.mark.slow
def test_a_task_begins_with_weights_and_goes_on_from_a_checkpoint(tmp_path):
    tabular = str(examples.project() / "tabular" / "workflow.py")
    (tmp_path / "tune.py").write_text(WORKFLOW)
    options = ("--options", '{"keep_checkpoint": true, "nproc": 2}')
    said, _ = run(tmp_path, tabular, "tabular_wf", "--settings", '{"epochs": 3}', *options)
    model, checkpoint = output(said, "model_state"), output(said, "logs") / "final-checkpoint"
    settings = '{"epochs": 2, "freeze": "0", "validation_fraction": 0.2}'

    tuned, log = run(tmp_path, "tune.py", "tune_wf", "--settings", settings, "--init", str(model))
    assert "Starts from 6 of 6 tensors of model.pt\nFrozen: 0.weight, 0.bias\n" in log
    assert "282 training, 71 validation and 89 test patients" in log
    assert "Epoch 1 of 2: validation r2 " in log
    first, second = (torch.load(path, weights_only=True) for path in (model, output(tuned, "model_state")))
    assert {name for name in first if torch.equal(first[name], second[name])} == {"0.weight", "0.bias"}
    assert (output(tuned, "logs") / "last.pt").is_file()

    shutil.copy(model, tmp_path / "copy.pt")
    again, log = run(tmp_path, "tune.py", "tune_wf", "--settings", settings, "--init", "copy.pt")
    same_model = output(again, "model_state") == output(tuned, "model_state")
    assert (same_model, "Epoch" in log) == (True, False), "the same content, and so a cache hit"

    _, log = run(tmp_path, "tune.py", "tune_wf", "--settings", '{"epochs": 4}', "--init", str(checkpoint))
    assert "Continues from final-checkpoint, after epoch 3\n" in log
    assert re.findall(r"^Epoch (\d) of 4", log, re.MULTILINE) == ["4"]
