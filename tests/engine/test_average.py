"""The exponential moving average of a network."""

import pytest
import torch
from torch import nn

from flyte_ddp.engine.average import Average
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings, Sound


def test_tied_weights_are_averaged_once_per_step():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = one.weight
    model = nn.Sequential(one, other, nn.BatchNorm1d(2))
    average, before = Average(model, 0.9), one.weight[0, 0].item()
    for steps, value in enumerate((1.0, 2.0)):
        for name in ("0.weight", "2.running_mean"):
            nn.init.constant_(model.state_dict()[name], value)
        average.update(model, steps)
    found = average.model.state_dict()
    first = {"2.running_mean": 0.0, **dict.fromkeys(("0.weight", "1.weight"), before)}
    for name, start in first.items():
        expected = (0.1 * start + 0.9 * 1) * 2 / 11 + 2 * 9 / 11
        assert found[name].flatten()[0].item() == pytest.approx(expected)


def test_a_short_training_is_averaged_over_its_end_and_a_long_one_as_long_as_asked():
    model = nn.Linear(1, 1, bias=False)
    average, short = Average(model, 0.99), 115
    for steps in range(10_000):
        nn.init.constant_(model.weight, float(steps))
        average.update(model, steps)
        (found,) = average.model.parameters()
        if steps == short:
            assert short - 20 < found.item() < short - 5
    assert found.item() == pytest.approx(steps - 0.99 / 0.01, abs=0.1)


class Leaping(Sound):
    """Its gradients leap in one step, whose update is left out."""

    ema_decay = 0.9
    spike = 70
    weights: list[torch.Tensor]  # of the last layer, before the first step and after each step that was taken
    now = 0

    def data(self, split):
        return super().data(split).repeat(8, 1)

    def measure(self, outputs, batch):
        factor = 1000 if self.now == self.spike and not self.share.alone else 1
        return {"loss": factor * super().measure(outputs, batch)["loss"]}

    def optimizer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        weights = Leaping.weights = [model[2].weight.detach().clone()]
        optimizer.register_step_post_hook(lambda *_: weights.append(model[2].weight.detach().clone()))
        return optimizer

    def lr_lambda(self, step, total_steps):
        self.now = step
        return 1.0


def test_a_training_averages_the_weights_of_each_step_but_not_of_one_that_is_left_out(alone, tmp_path):
    result = train(Leaping, Settings(batch_size=1, skip_spikes=6), RunOptions(tracking="off"), output=tmp_path)
    expected, *weights = Leaping.weights
    steps = [step for step in range(96) if step != Leaping.spike]
    for step, weight in zip(steps, weights, strict=True):
        expected = expected.lerp(weight, 1 - min(0.9, (1 + step) / (10 + step)))
    found = torch.load(result.model_path, weights_only=True)["2.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
