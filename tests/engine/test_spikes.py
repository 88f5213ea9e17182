"""Updates of steps whose gradients leap are left out, if that is asked for, alike on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flyte_ddp.engine.spikes import FIRST, Spikes
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, Event, GradientsSeen, NotLearning
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train

SAMPLES, EPOCHS = 480, 2


class Spiking(Recipe):
    """Has one sample whose gradient is a thousand times that of others, in each epoch."""

    def data(self, split):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, 4, generator=generator)
        scales = torch.ones(SAMPLES)
        scales[8] = 1000.0
        return inputs, inputs.sum(1, keepdim=True), scales

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, model, batch):
        return model(batch[0])

    def measure(self, outputs, batch):
        return {"loss": F.mse_loss(outputs, batch[1], reduction="none")[:, 0] * batch[2]}


class Averaged(Spiking):
    ema_decay = 0.9


class ByHost(Averaged):
    """Its optimizer cannot leave out a step by itself."""

    def optimizer(self, model):
        return torch.optim.Rprop(model.parameters(), 1e-3)


class KilledError(Exception):
    pass


def trained(folder: Path, recipe: type = Averaged, nproc: int = 1, is_killed: bool = False, **values: Any):
    """Train, or be killed in the middle of the second epoch, and return the result and what was told of updates."""
    told: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, NotLearning) and "left out" in event.reason:
            told.append(event.reason)
        if is_killed and isinstance(event, CheckpointWritten) and (event.epoch, event.step) >= (1, 60):
            raise KilledError

    # Each evaluation is followed by a checkpoint: there is one after step 60 of 120
    settings = TrainingSettings(
        epochs=EPOCHS, batch_size=4, log_interval=5, virtual_ranks=3, evaluations_per_epoch=2,
        **{"skip_spikes": 6, **values},
    )  # fmt: skip
    return train(recipe, settings, RunOptions(nproc=nproc), output=folder, on_event=listen), told


def test_a_spike_is_told_and_hardly_moves_the_mean():
    spikes = Spikes(6, torch.device("cpu"))
    norms = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 1
    before = spikes.values[:3].clone()
    for number, norm in enumerate(norms):
        if number == FIRST - 1:
            assert not spikes.judge(torch.tensor(50.0)), "among the first, nothing is judged"
            spikes.values[:3] = before
        before = spikes.values[:3].clone()
        assert not spikes.judge(norm)
    assert spikes.values[1] == pytest.approx(1.5, abs=0.1)
    before = spikes.values.clone()
    assert spikes.judge(torch.tensor(5.0))
    assert spikes.values[1] == pytest.approx(float(before[1]), rel=0.02)
    assert spikes.count() == 1
    assert not spikes.judge(torch.tensor(2.2))


def test_norms_that_stay_higher_are_soon_none():
    spikes = Spikes(6, torch.device("cpu"))
    for number in range(1000):
        spikes.judge(torch.tensor(1.0 if number < 500 else 3.0))
    assert 1 <= spikes.count() < 50


def test_equal_norms_are_no_spikes():
    spikes = Spikes(6, torch.device("cpu"))
    for number in range(200):
        assert not spikes.judge(torch.tensor(1.0) + 1e-6 * (number % 3))


@pytest.mark.parametrize("recipe", [Averaged, ByHost])
def test_the_update_of_a_spike_is_left_out_to_the_same_bits_killed_or_not(tmp_path, recipe):
    whole, told = trained(tmp_path / "whole", recipe)
    line = "updates left out in steps {} of epoch {}, whose gradients leap: 1"
    assert told == [line.format("96 to 100", 1), line.format("111 to 115", 2)]
    with pytest.raises(KilledError):
        trained(tmp_path / "killed", recipe, is_killed=True)  # with too few steps left to judge by these alone
    resumed, told_then = trained(tmp_path / "killed", recipe, nproc=2)
    assert (resumed.digest, told_then) == (whole.digest, told[1:])
    other, nothing = trained(tmp_path / "other", recipe, skip_spikes=0, stop_after=1)
    is_same = [ours.digest == theirs.digest for ours, theirs in zip(other.epochs, whole.epochs[:2], strict=True)]
    assert (is_same, nothing) == ([True, False], [])  # before and after the first spike


@pytest.mark.parametrize("recipe", [Averaged, ByHost])
def test_gradients_that_are_not_stepped_by_have_no_histogram(tmp_path, recipe):
    epochs: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, GradientsSeen):
            epochs.append(event.epoch)

    # By this seed the spike comes in the last step of the second epoch
    settings = TrainingSettings(epochs=EPOCHS, batch_size=4, virtual_ranks=3, skip_spikes=6, seed=28)
    train(recipe, settings, RunOptions(nproc=1, log_gradients=True), output=tmp_path, on_event=listen)
    assert epochs == [0]


def test_too_few_deviations_are_refused():
    with pytest.raises(InputError, match="skip_spikes must be 0 or at least 3 deviations, got 1: "):
        TrainingSettings(skip_spikes=1)
