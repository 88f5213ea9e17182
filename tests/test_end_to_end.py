"""The real pyflyte, as a user types it: from another folder, without PYTHONPATH, with and without the data sets."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from flyte_ddp.attempt.options import explain_settings
from flyte_ddp.fields import describe_fields
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.commands import OFFLINE, ROOT, pyflyte, start_pyflyte, words

WORKFLOW = [str(ROOT / "workflows" / "mnist.py"), "pytorch_training_wf"]


class Run(NamedTuple):
    status: int
    out: str
    log: str

    @property
    def accuracies(self) -> list[float]:
        (found,) = re.findall(r"epoch_accuracies=\[([^]]*)]", self.out)
        return [float(accuracy) for accuracy in found.split(", ")]

    @property
    def model(self) -> Path:
        (found,) = re.findall(r"model_state=([^,]+),", self.out)
        return Path(found)

    def summary(self, name: str) -> str:
        (found,) = re.findall(rf"\b{name}='?([^,')]*)", self.out.partition("TrainingSummary(")[2])
        return str(found)


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user with an empty home: returns pyflyte_run(*arguments, **environment)."""
    home = tmp_path / "home"
    elsewhere = tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    variables = {"HOME": home, "DDP_DATA_DIR": home / "data", "DDP_RUNS_DIR": home / "runs", "TMPDIR": tmp_path}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(elsewhere)

    def pyflyte_run(*arguments: str, **environment: str) -> Run:
        command = ["pyflyte", "run", *WORKFLOW, *arguments]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
        return Run(done.returncode, done.stdout, done.stderr)

    return pyflyte_run


@pytest.mark.slow
def test_without_data_or_network_it_trains_on_digits_and_remembers_the_result_but_not_the_stand_in(
    user, tmp_path, request
):
    first = user(**OFFLINE)
    assert first.status == 0, first.log
    assert "mnist cannot be downloaded here: this run trains on digits" in first.log
    assert first.summary("dataset") == "digits"
    assert first.accuracies[-1] >= 0.97
    assert float(first.summary("accuracy")) == first.accuracies[-1]
    assert first.model.is_file()
    assert list(tmp_path.glob("ddp-*")) == []

    done = pyflyte(*WORKFLOW, environment=OFFLINE)
    cached = Run(done.returncode, done.stdout, done.stderr)
    assert cached.out == first.out
    assert "Train Epoch" not in cached.log
    assert f"Cached:  trained before on {first.summary('world_size')} rank" in cached.log
    assert f"Model:   {first.model}" in cached.log

    if "DDP_TEST_DATA" in os.environ:
        mirror = request.getfixturevalue("test_data").as_uri()
        few = '{"epochs": 1, "train_fraction": 0.05}'
        done = pyflyte(*WORKFLOW, "--hp", few, environment={"DDP_DATA_MIRROR": mirror, **OFFLINE})
        real = Run(done.returncode, done.stdout, done.stderr)
        assert real.summary("dataset") == "mnist", real.log
        assert (real.summary("train_samples"), real.summary("test_samples")) == ("60000", "10000")
        assert real.accuracies[-1] >= 0.8


def test_an_explicit_name_never_falls_back(tmp_path):
    empty = tmp_path / "empty mirror"
    empty.mkdir()
    places = {"DDP_DATA_MIRROR": empty.as_uri(), "DDP_DATA_DIR": str(tmp_path / "data")}
    run = pyflyte(*WORKFLOW, "--hp", '{"dataset": "mnist"}', status=1, environment={**places, **OFFLINE})
    report = words(run.stderr + run.stdout)
    assert "no mirror delivered train-images-idx3-ubyte.gz" in report
    assert "no such file" in report
    assert "proxy" in report
    assert "set DDP_DATA_MIRROR to" in report


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hp", '{"epochz": 2}'], ["epochz", "did you mean epochs?"]),
        (["--epochs", "2"], ["No such option '--epochs'. epochs is a field of --hp: --hp '{\"epochs\": "]),
        (["--hp", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["--options", '{"nproc": 3}', "--hp", '{"batch_size": 2}'], ["number of ranks (3)", "got 2", "raise it"]),
    ],
)
def test_a_wrong_input_is_a_usage_error_before_anything_is_done(tmp_path, arguments, said):
    places = {"DDP_DATA_MIRROR": (tmp_path / "nowhere").as_uri(), "DDP_DATA_DIR": str(tmp_path / "data")}
    report = words(pyflyte(*WORKFLOW, *arguments, status=2, cwd=tmp_path, environment=places).stderr)
    assert all(text in report for text in said), report
    assert not (tmp_path / "data").exists()


def test_the_help_has_a_line_for_each_setting_and_no_schema():
    pyflyte(*WORKFLOW, "--help")
    explain_settings(lambda option: None)  # as the import of flyte2/ does, for options of its own
    said = words(pyflyte(*WORKFLOW, "--help").stdout)
    for kind in (Hyperparameters, RunOptions):
        for name, text in describe_fields(kind).items():
            assert not text.startswith("[default"), f"{name} has no help"
            assert words(f"- {name}: {text}") in said
    assert (
        "--hp JSON the settings that determine the result; omitted fields keep their defaults. - backend: process group"
        in said
    )
    assert '"properties"' not in said


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_goes_on_and_ends_with_the_same_bits(user):
    arguments = [
        "--hp",
        '{"dataset": "digits", "epochs": 1, "train_fraction": 0.4, "log_interval": 1, "precision": "float32"}',
    ]
    running = start_pyflyte(*WORKFLOW, *arguments, cwd=Path.cwd())
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("Train Epoch"):
            break
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert "Interrupted; the same command resumes from" in said
    assert running.returncode not in (0, None)

    done = pyflyte(*WORKFLOW, *arguments)
    resumed = Run(done.returncode, done.stdout, done.stderr)
    assert "resuming from the checkpoint" in resumed.log
    done = pyflyte("--overwrite-cache", *WORKFLOW, *arguments)
    whole = Run(done.returncode, done.stdout, done.stderr)
    assert "resuming" not in whole.log
    assert whole.model != resumed.model
    assert whole.model.read_bytes() == resumed.model.read_bytes()
    assert whole.accuracies == resumed.accuracies
