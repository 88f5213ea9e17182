"""The exponential moving average of a network."""

import pytest
from torch import nn

from flyte_ddp.engine.average import Average


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
