"""A training task on a platform that is no more than folders: what every platform gets from the library."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.attempt.platform_training import ClassifierTraining
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.code.user_code import find_code
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.attempt.folders import FolderError, Folders, OnFolders
from tests.small_training import small_data  # noqa: F401 a fixture

pytestmark = pytest.mark.slow
HP = Hyperparameters(epochs=2, batch_size=16, precision="float32")


class FolderTraining(OnFolders, ClassifierTraining[Path, Trained]):
    def __init__(self, platform, observers=()):
        super().__init__([find_code(f"tests.attempt.killers:{name}") for name in observers])
        self.platform = platform


def run(platform, data, hp=HP, observers=(), nproc=1, **more):
    options = RunOptions(nproc=nproc, tracking="off", **more)
    return FolderTraining(platform, observers).run(hp, options, data)


def test_an_attempt_leaves_logs_report_and_checkpoint_and_the_next_one_goes_on_from_there(small_data, tmp_path):  # noqa: F811
    first, hp = Folders(tmp_path), dataclasses.replace(HP, validation_fraction=0.2)
    trained = run(first, small_data, hp, keep_best=1)
    stored = {str(file.relative_to(tmp_path / "0")) for file in (tmp_path / "0").rglob("*") if file.is_file()}
    assert {"report.html", "logs/console.log", "logs/progress.jsonl", "checkpoints/checkpoint"} <= stored
    assert trained.logs_url == first.logs_url()
    assert "Train Epoch: 1" in (tmp_path / "0" / "logs" / "console.log").read_text()
    assert trained.image_summary().accuracy > 0.3
    assert len(trained.epoch_measures) == 2
    assert f"{trained.image_summary().accuracy:.2%}" in first.pages[-1]

    again = run(Folders(tmp_path, attempt=1), small_data, hp, keep_best=1)
    log = (tmp_path / "1" / "logs" / "console.log").read_text()
    assert f"those of the previous attempt: {tmp_path}/0/logs" in log
    assert "resuming from the checkpoint" in log
    assert "Train Epoch" not in log
    weights = [torch.load(one.model, weights_only=True) for one in (trained, again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    (best,) = trained.figures.kept
    assert trained.figures.kept == again.figures.kept
    assert (trained.logs / best.file).read_bytes() == (again.logs / best.file).read_bytes()
    assert best.file in again.report.read_text()


def test_another_execution_goes_on_from_a_named_checkpoint_and_refuses_that_of_another_training(small_data, tmp_path):  # noqa: F811
    first = run(Folders(tmp_path / "first"), small_data)
    log, report = ((tmp_path / "first" / "0" / name).read_text() for name in ("logs/console.log", "report.html"))
    folder = str(tmp_path / "first" / "0" / "checkpoints")
    assert folder in log
    assert folder in report

    second = run(Folders(tmp_path / "second"), small_data, resume_from=folder)
    assert "Train Epoch" not in (tmp_path / "second" / "0" / "logs" / "console.log").read_text()
    assert first.model.read_bytes() == second.model.read_bytes()

    with pytest.raises(FolderError, match=f"the checkpoint in {folder} belongs .* its epochs was 2, now it is 3"):
        run(Folders(tmp_path / "third"), small_data, dataclasses.replace(HP, epochs=3), resume_from=folder)
    with pytest.raises(FolderError, match="must be a folder with a checkpoint in it, got nowhere"):
        run(Folders(tmp_path / "fourth"), small_data, resume_from="nowhere")


LONG = dataclasses.replace(HP, epochs=2, batch_size=2)
OFTEN: dict[str, Any] = {"nproc": 2, "checkpoint_seconds": 0.3}


def test_a_killed_rank_comes_back_in_the_same_pod_and_trains_the_same(small_data, tmp_path):  # noqa: F811
    whole, disturbed = (
        run(Folders(tmp_path / name), small_data, LONG, observers, **OFTEN)
        for name, observers in (("whole", ()), ("disturbed", ["Once"]))
    )
    assert whole.model.read_bytes() == disturbed.model.read_bytes()
    assert whole.epoch_measures == disturbed.epoch_measures
    assert (
        "the ranks start again from the checkpoint: rank 1 on "
        in (tmp_path / "disturbed" / "0" / "logs" / "console.log").read_text()
    )
    assert "The ranks were started again" in disturbed.report.read_text()


def test_ranks_that_are_killed_again_and_again_are_for_another_pod(small_data, tmp_path):  # noqa: F811
    platform = Folders(tmp_path)
    with pytest.raises(FolderError, match="SIGKILL") as failed:
        run(platform, small_data, dataclasses.replace(LONG, epochs=100), ["Always"], **OFTEN)
    assert failed.value.failure.recoverable
    log = (tmp_path / "0" / "logs" / "console.log").read_text()
    assert log.count("the ranks start again") == 2


def test_a_rank_killed_before_a_checkpoint_is_for_another_pod(small_data, tmp_path):  # noqa: F811
    with pytest.raises(FolderError, match="SIGKILL"):
        run(Folders(tmp_path), small_data, dataclasses.replace(LONG, epochs=100), ["Early"], nproc=2)
    assert "start again" not in (tmp_path / "0" / "logs" / "console.log").read_text()
