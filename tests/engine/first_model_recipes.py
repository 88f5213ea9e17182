"""Recipes whose networks are to be sharded from the start, and some whose model() needs values for that."""

from typing import Any

import torch
from torch import distributed, nn

from tests.engine.probe_recipes import WIDTH, Sound


class Network(nn.Sequential):
    """With tied weights, a part that model() freezes, and buffers of which one is in no file."""

    total: Any
    shift: torch.Tensor

    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self[3].weight = self[0].weight
        self[1].requires_grad_(False)
        self.register_buffer("shift", torch.rand(3), persistent=False)
        self.register_buffer("count", torch.randint(9, ()))


class Starting(Sound):
    ema_decay, fsdp_units = 0.5, ("1", "2")

    def model(self):
        return Network()


class Reading(Starting):
    def model(self):
        network = Network()
        network.total = network.get_parameter("0.weight").sum().item()
        return network


class Keeping(Starting):
    """Has a tensor that is no buffer."""

    def model(self):
        network = Network()
        network.scale = torch.ones(WIDTH)
        return network


class Viewing(Starting):
    """Has a buffer that is a part of another."""

    def model(self):
        network = Network()
        network.register_buffer("part", network.shift[:2])
        return network


class Differing(Starting):
    """Has one buffer more where tensors have no values."""

    def model(self):
        network = Network()
        if network.count.is_meta:
            network.register_buffer("more", torch.ones(1))
        return network


class OnEachRank(Starting):
    """Has another buffer on each rank, with values and without."""

    def model(self):
        network = Network()
        network.register_buffer(f"of_rank_{distributed.get_rank()}", torch.ones(1))
        return network
