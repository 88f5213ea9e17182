"""python -m flyte_ddp run."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import flyte_ddp
from flyte_ddp.__main__ import main
from flyte_ddp.run.command import as_typed, find_settings_class, make_command
from flyte_ddp.settings import TrainingSettings
from tests.commands import ROOT
from tests.examples import project


def run(*arguments):
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A user in the folder of their packages."""
    monkeypatch.chdir(project())


def test_it_trains_with_the_settings_that_it_is_given(tmp_path):
    given = ["--epochs", "1", "--width", "16", "--learning-rate", "1e-2", "--nproc", "2", "--resume", "False"]
    given += ["--tracking", "tensorboard"]
    status, said = run("own_loop.loop:train", *given, "--output", str(tmp_path / "trained"))
    assert status == 0, said
    assert f"Report: {tmp_path}/trained/report.html" in said
    assert "<title>Finished: training on own_loop" in (tmp_path / "trained" / "report.html").read_text()
    assert list((tmp_path / "trained" / "tensorboard").glob("*/events.*"))
    assert torch.load(tmp_path / "trained" / "model.pt", weights_only=True)["0.weight"].shape == (16, 64)


def test_its_help_has_a_text_for_each_setting():
    status, said = run("tabular.recipe:Tabular", "--help")
    assert status == 0
    for words in (
        "--width int [default: 32]", "--test-batch-size int samples of one evaluation batch, all ranks together.",
        "--compile bool whether torch.compile compiles", "--nproc int ranks to spawn;", "[default: trained]",
    ):  # fmt: skip
        assert words in said
    assert "--resume-from" not in said, "train() has none"


@dataclass(frozen=True, kw_only=True)
class Required(TrainingSettings):
    depth: int


def test_a_setting_without_a_default_is_a_required_option():
    for given, words in ((), "Missing option '--depth'"), (("--depth", "x"), "--depth must be a whole number, got x"):
        result = CliRunner().invoke(make_command("tabular.recipe:Tabular", Required), given)
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())


def signalled(number: int, words: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a run says after the line with these words, upon which it gets the signal."""
    command = [sys.executable, "-m", "flyte_ddp", "run", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            break
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return said


@pytest.mark.slow
def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path):
    given = ["own_loop.loop:train", "--epochs", "100000", "--nproc", "1", "--output", str(tmp_path)]
    said = signalled(signal.SIGINT, "Train Epoch", *given)
    assert f"Interrupted; the same command resumes from {tmp_path}/checkpoint\n" in said
    assert said.endswith("Aborted!\n")
    assert "<title>Failed: training on own_loop" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_is_stopped_before_its_first_step_promises_no_checkpoint(tmp_path):
    (tmp_path / "waiting.py").write_text(
        "import signal\n\n\ndef train(loop):\n    print('here', flush=True)\n    while True:\n        signal.pause()\n"
    )
    said = signalled(signal.SIGTERM, "here", "waiting:train", "--nproc", "1", cwd=tmp_path)
    assert said.endswith("before the first step: an earlier checkpoint, if there is one, is as it was\n")


def test_the_command_has_a_version():
    assert flyte_ddp.__version__ in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], r"give a name such as \"package.module:Name\", got 'nothing'"),
        (["tabular.recipe:Tabluar"], "defines no Tabluar at its top level"),
        (["tabular.recipe:Tabular", "--epochs", "many"], "--epochs must be a whole number, got many"),
        (["tabular.recipe:Tabular", "--epochs", "0"], "Settings.epochs must be at least 1, got 0"),
        (["tabular.recipe:Tabular", "--resume", "perhaps"], "--resume must be true or false, got perhaps"),
        (["tabular.recipe:Tabular", "--epoch", "1"], "No such option '--epoch'.*--epochs.*those of tabular.settings."),
        (["tabular.recipe:Tabular", "--output", "~nobody-of-this-name/out"], "no home folder for ~nobody-of-this-name"),
        (["--settings-class", "os:path", "tabular.recipe:Tabular"], "--settings-class must be a subclass of"),
        (["--settings-class", "nowhere:X", "tabular.recipe:Tabular"], "--settings-class must name the class of"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words):
    status, said = run(*arguments)
    assert status != 0
    assert re.search(words, said), said


def test_a_folder_of_settings_beside_the_recipe_is_no_module_of_them(tmp_path, monkeypatch):
    (tmp_path / "settings").mkdir()
    (tmp_path / "alone.py").write_text("class Recipe: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_settings_class("alone:Recipe", None) is TrainingSettings


@pytest.mark.parametrize("name", ["init", "data", "output", "nproc"])
def test_a_setting_named_as_an_option_of_the_command_is_told_to_be_renamed(tmp_path, monkeypatch, name):
    package = f"has_{name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "recipe.py").write_text("class Recipe: ...\n")
    (tmp_path / package / "settings.py").write_text(
        "from dataclasses import dataclass\nfrom flyte_ddp import TrainingSettings\n"
        f"@dataclass(frozen=True)\nclass Settings(TrainingSettings):\n    {name}: str = ''\n"
    )
    monkeypatch.chdir(tmp_path)
    status, said = run(f"{package}.recipe:Recipe", "--epochs", "1")
    assert status == 2
    assert f"Settings.{name} must have another name, as --{name} is an option of the command itself: rename" in said
    assert "Usage" not in said


def test_a_remedy_names_options_as_they_are_typed():
    assert as_typed("drop it by RunOptions(resume=False), or …") == "drop it by --resume false, or …"


def test_a_variable_that_nothing_reads_is_one_sentence(monkeypatch):
    monkeypatch.setenv("DDP_RUN_DIR", "/elsewhere")
    status, said = run("tabular.recipe:Tabular", "--epochs", "1")
    assert status != 0
    assert "environment variable DDP_RUN_DIR is unknown (did you mean DDP_RUNS_DIR?): rename or unset it" in said


def test_a_current_folder_that_has_been_removed_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, said = run("tabular.recipe:Tabular", "--epochs", "1")
    assert status != 0
    assert "the current folder has been removed: change to one that is there (cd)" in said
