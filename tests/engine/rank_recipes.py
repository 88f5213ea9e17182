"""Recipes that ask for the rank, or for the number of ranks."""

import os

import torch
from torch import distributed

from tests.engine.probe_recipes import Sound


class ScaledRate(Sound):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.01 * distributed.get_world_size())


class ScaledSchedule(Sound):
    def lr_lambda(self, step, steps):
        return distributed.get_world_size() ** (step / steps)


class VariableRate(Sound):
    """Asks for what torchrun, and a launch on many nodes, have set."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.01 * int(os.environ["WORLD_SIZE"]))


class ProcessInMeasure(Sound):
    """Something else on each rank, for the same samples."""

    def measure(self, outputs, batch):
        return {"loss": (outputs - batch).square().mean(1) * (1 + os.getpid() % 97)}
