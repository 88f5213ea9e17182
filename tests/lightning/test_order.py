"""The order in which a loader reads: the same in a resume, and in each pass of an epoch another one."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flyte_ddp.lightning.order import Order

SAMPLES = TensorDataset(torch.arange(5))  # three batches


def order(seed=0, epoch=1):
    return Order(DataLoader(SAMPLES, 2, shuffle=True), (seed, 0, 0), 0, lambda: epoch)


def test_a_loader_that_begins_again_within_an_epoch_reads_in_another_order():
    one = order()
    passes = [[*one] for _ in range(3)]
    assert all(sorted(chain.from_iterable(batches)) == [*range(5)] for batches in passes)
    assert len({str(batches) for batches in passes}) == 3
    assert [*order()] == passes[0]
    assert [*order(seed=1)] != passes[0]
    assert [*order(epoch=2)] != passes[0]


@pytest.mark.parametrize(
    ("step", "has_cycles", "number", "skipped"), [(2, True, 0, 2), (4, True, 1, 1), (4, False, 0, 4)]
)
def test_a_resume_leaves_out_what_was_read(step, has_cycles, number, skipped):
    whole = order()
    passes = [[*whole] for _ in range(3)]
    resumed = order()
    resumed.begin_at(step, has_cycles)
    assert [*resumed] == passes[number][skipped:]
    assert [*resumed] == passes[number + 1]
