"""A pod that trains a LightningModule: that of examples/autoencoder, killed, and the next attempt."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flyte_ddp.lightning.settings import LightningOptions
from tests.commands import ROOT
from tests.examples import project
from tests.pod import Pod, is_whole, literal, registered, small_dataset

pytestmark = pytest.mark.slow


def steps_in(logs):
    (file,) = (logs / "tensorboard").glob("*/*")
    return [
        one.step for one in EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload().Scalars("train/loss")
    ]


def has_steps(logs):
    return any(b"train/loss" in file.read_bytes() for file in logs.glob("tensorboard/*/*"))


def test_a_retry_goes_on_from_the_checkpoint_of_a_killed_pod(tmp_path, monkeypatch):
    place = project()
    monkeypatch.setenv("DDP_PROFILE", "sandbox")
    monkeypatch.delitem(sys.modules, "autoencoder.workflow", raising=False)  # which is registered otherwise
    from autoencoder.settings import Settings
    from autoencoder.workflow import train_autoencoder

    settings = Settings(epochs=40, batch_size=50, learning_rate=0.01)
    inputs = {"settings": literal(settings), "data": small_dataset(tmp_path / "small")}
    inputs["options"] = literal(LightningOptions(tracking="tensorboard"))
    task, path = registered(train_autoencoder), {"PYTHONPATH": f"{ROOT}:{place}"}

    first = Pod(task, inputs, tmp_path / "killed", path)
    first.kill_when(lambda: is_whole(first.checkpoints / "checkpoint") and has_steps(first.logs))
    second = Pod(task, inputs, tmp_path / "retried", path, previous=first)
    assert Path(second.run_here()["model_state"].scalar.blob.uri).exists()
    assert "resuming from the checkpoint: epoch " in second.log
    steps = steps_in(second.logs)
    assert steps == sorted({*steps}), "none is written twice"
    assert steps[0] == 10, "the file of the first attempt goes on"
    assert "\nLast:    epoch 40;" in second.log
