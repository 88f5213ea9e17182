"""The exponential moving average of a network."""

import pytest
from torch import nn

from flyte_ddp.engine.average import Average


def test_tied_weights_are_averaged_once_per_step():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = one.weight
    model = nn.Sequential(one, other, nn.BatchNorm1d(2))
    average = Average(model, 0.9)
    for value, is_first in ((1.0, True), (2.0, False)):
        for name in ("0.weight", "2.running_mean"):
            nn.init.constant_(model.state_dict()[name], value)
        average.update(model, is_first)
    found = average.model.state_dict()
    for name in ("0.weight", "1.weight", "2.running_mean"):
        assert found[name].flatten()[0].item() == pytest.approx(0.9 * 1 + 0.1 * 2)
