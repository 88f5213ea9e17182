"""The step that adds the gradients of a batch's parts up, on one rank."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flyte_ddp.engine.own_loop.parts import ExactGradients


@pytest.fixture(autouse=True, scope="module")
def alone():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_units_of_a_checkpoint_go_to_the_device():
    """A step with fewer calls than the last one leaves units as they were, and a checkpoint stacks them all."""
    step = ExactGradients(nn.Linear(3, 2), 4).parallel
    device = torch.device("meta")
    step._units.exponents = step._units.exponents.to(device)  # as on a GPU
    step.grid = torch.zeros(2, *step._units.exponents.shape, dtype=torch.int32)
    grid = step.grid
    assert grid is not None
    assert (len(grid), grid.device) == (2, device)
