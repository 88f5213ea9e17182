"""`flyte run --local`, in the test's process: inputs, results, the cache."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import flyte
import numpy as np
import pytest
from click.testing import CliRunner
from flyte.cli._params import JsonParamType
from flyte.cli.main import main

from flyte_ddp.recipes.hyperparameters import Hyperparameters
from scripts.smoke2 import all_runs
from tests.commands import ROOT, words

SMALL = {"dataset": "digits", "epochs": 1, "batch_size": 512, "train_fraction": 0.25}


def flyte_run(*arguments: str, status: int = 0, file: str = "flyte2/mnist.py", task: str = "main", cwd: Path = ROOT):
    """What it prints; fails if it ends otherwise."""
    with pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        here.setenv("DO_NOT_TRACK", "1")  # the SDK reports its own failures to its makers
        # The SDK imports flyte2/sweep.py as `sweep`: another test's sweep.py would not be read after it
        here.setattr(sys, "path", [*sys.path])
        here.setitem(sys.modules, Path(file).stem, None)
        done = CliRunner().invoke(main, ["run", "--local", file, task, *arguments], terminal_width=200)
    assert done.exit_code == status, done.output
    return words(done.output)


@pytest.mark.parametrize(
    ("hp", "says"),
    [
        ('{"epochz": 1}', 'Hyperparameters has no field "epochz" (did you mean epochs?)'),
        ("no-such-file.yaml", "no-such-file.yaml cannot be read (No such file or directory)"),
    ],
)
def test_an_input_that_is_wrong_is_refused_in_one_line(hp, says):
    said = flyte_run("--hp", hp, status=1)
    assert says in said
    assert "Traceback" not in said


def test_a_setting_that_is_given_as_an_option_is_told_where_it_belongs():
    value = json.dumps({"learning_rate": Hyperparameters().learning_rate})
    said = flyte_run("--learning-rate", "1", status=1)
    assert f"No such option '--learning-rate'. learning_rate is a field of --hp: --hp '{value}'" in said
    assert "is a field of" not in flyte_run("--nothing", "1", status=1)


def test_the_help_has_a_line_for_each_setting_and_no_schema():
    said = flyte_run("--help")
    assert "epochs: passes over the training samples. [default: 2]" in said
    assert "properties" not in said


PLAIN = """
from pathlib import Path
from flyte_ddp import RunOptions
from flyte_ddp.flyte2.recipe import RecipeTraining
from tests.engine.probe_recipes import Settings
for name in ("probe_recipes:Sound", "own_loops:train"):
    outputs = RecipeTraining(f"tests.engine.{name}").run(Settings(epochs=1), RunOptions(nproc=1))
    assert len(outputs.epoch_measures) == 1
    assert all(Path(output.path).exists() for output in (outputs.model_state, outputs.report, outputs.logs))
"""


@pytest.mark.slow
def test_trainings_of_a_recipe_and_of_a_loop_run_without_a_run_of_flyte():
    """In a process of its own: `flyte run` sets Flyte up for good."""
    done = subprocess.run([sys.executable, "-c", PLAIN], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_model_that_is_not_there_is_said_to_be_missing(tmp_path):
    model = tmp_path / "none.pt"
    said = flyte_run("--model_state", str(model), status=1, file="flyte2/inference.py")
    assert "model_state must be a file, and" in said


@pytest.mark.parametrize("is_there", [False, True])
def test_what_to_start_from_must_be_a_file_before_anything_is_prepared(tmp_path, is_there):
    path = tmp_path / "of a training"
    if is_there:
        path.mkdir()
    said = flyte_run("--init", str(path), status=1)
    assert "must be a file that is there: give the path" in said
    assert "Traceback" not in said
    assert "Task 'mnist.prepare'" not in said


def test_no_shards_are_refused_instead_of_predicting_nothing(tmp_path):
    said = flyte_run("--model_state", str(tmp_path / "none.pt"), "--shards", "0", status=1, file="flyte2/inference.py")
    assert "shards must be at least 1, got 0" in said


@pytest.mark.slow
def test_a_run_is_cached_by_its_inputs_but_not_its_options_until_its_files_are_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    hp = json.dumps({**SMALL, "seed": 11})
    first = flyte_run("--hp", hp)
    assert "Epoch 1 of 1: test accuracy" in first
    (accuracy,) = re.findall(r"epoch_accuracies=\[([^\]]*)\]", first)
    again = flyte_run("--hp", hp, "--options", '{"nproc": 1}')
    assert "Epoch 1 of 1" not in again
    assert f"epoch_accuracies=[{accuracy}]" in again
    (run,) = tmp_path.glob("*-digits-*")
    shutil.rmtree(run)
    assert "Epoch 1 of 1" in flyte_run("--hp", hp, "--options", '{"nproc": 1}')


def test_a_file_of_settings_is_read_and_missing_fields_keep_their_defaults(tmp_path):
    (tmp_path / "hp.yaml").write_text("epochs: 7\n")
    read = JsonParamType(Hyperparameters).convert(str(tmp_path / "hp.yaml"), None, None)
    assert read == Hyperparameters(epochs=7)


def test_a_failure_is_said_and_not_tried_again():
    said = flyte_run("--hp", json.dumps(SMALL), "--options", '{"nproc": 1024}', status=1)
    assert said.count("batch_size must be at least the number of ranks") <= 3
    assert "retrying in" not in said


def test_a_roll_back_to_what_is_not_there_is_one_line(tmp_path):
    place = ("--place", str(tmp_path / "place"))
    assert "Versions: none" in flyte_run(*place, file="flyte2/promote.py", task="roll_back")
    said = flyte_run(*place, "--name", "second", file="flyte2/promote.py", task="roll_back", status=1)
    assert "has none: promote one first" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_trained_model_is_promoted_and_predicts(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    hp, place = json.dumps({**SMALL, "seed": 12}), str(tmp_path / "place")
    first = flyte_run("--place", place, "--hp", hp, "--artifact", "mnist", file="flyte2/promote.py")
    assert "as the first model" in first
    again = flyte_run("--place", place, "--hp", hp, file="flyte2/promote.py")
    assert "promoted=False" in again
    (version,) = (path.name for path in (tmp_path / "place" / "versions").iterdir())
    assert f"Versions: {version}" in flyte_run("--place", place, file="flyte2/promote.py", task="roll_back")
    back = flyte_run("--place", place, "--name", version, file="flyte2/promote.py", task="roll_back")
    assert f"Promoted: {version}" in back
    pointer = json.loads((tmp_path / "place" / "current.json").read_text())
    assert [event["how"] for event in pointer["history"]] == ["promoted", "rolled back"]
    (run,) = (path.parent for path in tmp_path.glob("*-digits-*/logs"))
    arguments = ("--model_state", str(run / "model.pt"), "--shards", "2")
    said = flyte_run(*arguments, "--split", "tset", status=1, file="flyte2/inference.py")
    assert "split must be one of train, test, got 'tset'" in said
    assert "serialize" not in said, "as what is no file among the files"
    flyte_run(*arguments, file="flyte2/inference.py")
    parts = sorted(tmp_path.glob("*/predictions-?.npy"), key=lambda path: path.name)
    assert len(parts) == 2
    rows = np.concatenate([np.load(part) for part in parts])
    assert np.array_equal(rows, np.load(run / "logs" / "predictions.npy"))


@pytest.mark.slow
def test_what_a_cluster_is_tried_with_runs_here_too(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    flyte.init()
    ended = list(all_runs(flyte.with_runcontext("local").run))
    trained, again, swept, promoted, predicted = (run.outputs()[0] for run in ended)
    assert trained == again, "cached"
    assert swept.training.summary.dataset == "digits"
    assert promoted.promoted
    assert len(predicted) == 2


@pytest.mark.slow
def test_a_sweep_cuts_trials_and_trains_with_the_best(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    sweep = {"values": {"learning_rate": [0.01, 0.1, 1e30]}, "reduction_factor": 2}
    hp = {**SMALL, "batch_size": 256, "epochs": 2, "seed": 13}
    arguments = ("--sweep", json.dumps(sweep), "--hp", json.dumps(hp), "--options", '{"nproc": 1}')
    flyte_run(*arguments, file="flyte2/sweep.py")
    (table,) = tmp_path.glob("*/trials.csv")
    with open(table, newline="") as file:
        best, second, diverged = csv.DictReader(file)
    assert (best["learning_rate"], best["trained_epochs"], second["trained_epochs"]) == ("0.1", "2", "1")
    assert diverged["failure"].startswith("NonFiniteError: loss is not finite in epoch 1")
    assert "Sweep of digits" in (table.parent / "report.html").read_text()
