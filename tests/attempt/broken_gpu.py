"""A recipe whose second rank loses its GPU in the second epoch, on the node that a variable names."""

import os

import torch
from torch import distributed, nn

from flyte_ddp import Classifier
from flyte_ddp.launch.environment import NODE_VARIABLE

BROKEN = "DDP_TEST_BROKEN_NODE"


class Points(Classifier):
    samples = "points"

    def data(self, split):
        return torch.arange(96).view(48, 2) / 96, torch.arange(48) % 2

    def model(self):
        return nn.Linear(2, 2)

    def lr_lambda(self, step, steps):
        node = os.environ.get(NODE_VARIABLE)
        if step == 8 and distributed.get_rank() == 1 and node and node == os.environ.get(BROKEN):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return 1.0
