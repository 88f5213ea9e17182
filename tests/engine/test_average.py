"""The exponential moving average of a network."""

import pytest
import torch
from torch import nn

from flyte_ddp.engine.average import Average


def test_tied_weights_are_averaged_once_per_step():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    average = Average(model, 0.9)
    for value, is_first in ((1.0, True), (2.0, False)):
        nn.init.constant_(model[0].weight, value)
        model[2].running_mean.fill_(value)
        average.update(model, is_first)
    for found in average.model.state_dict()["1.weight"], average.model.state_dict()["2.running_mean"]:
        assert found.flatten()[0].item() == pytest.approx(0.9 * 1 + 0.1 * 2)
    assert torch.equal(average.model[0].weight, average.model[1].weight)
