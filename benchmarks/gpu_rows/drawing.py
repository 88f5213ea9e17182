"""What a rank runs to compare what it draws on a GPU, by the kernel and by torch's operations."""

from typing import Any

import torch
from torch.nn import functional as F

from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.by_row import ByRow
from flyte_ddp.engine.global_batch.operators import dropout_kernel
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link


def compare_dropouts(environment: Environment, link: Link, argument: Any) -> str:
    """What differs; empty if nothing does, forward and backward, for the second half of a batch."""
    device = torch.device(environment.world.device)
    if dropout_kernel() is None:
        return "there is no Triton"
    features = torch.randn(8, 37, 11, device=device, requires_grad=True)
    rows = ByRow(BatchShare(8, 8, 16))
    with rows.block(1):
        found = F.dropout(features, 0.3)
    found.sum().backward()
    first, key = features.numel(), random_numbers.key_of(1, 0)
    mask = random_numbers.kept(key, first, features.numel(), device, 0.3).view_as(features)
    scaled = mask * random_numbers.threshold_of(0.3)[1]
    same = torch.equal(found, features * scaled) and torch.equal(features.grad, scaled)  # type: ignore[arg-type]
    return "" if same else "the kernel drops other elements than torch's operations"
