"""Sums that do not depend on the order of their addends."""

import math

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flyte_ddp.engine.virtual_ranks.whole_numbers import BLOCK, Digits, buckets_of


@pytest.fixture(autouse=True, scope="module")
def alone():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class One:
    """A bucket and its grid."""

    def __init__(self, addends: int):
        self.grid, (self.bucket,) = buckets_of([torch.zeros(3 * BLOCK)], Digits.of(addends), more=0)


def total(one: One, addends: list[torch.Tensor]) -> torch.Tensor:
    """With numbers that follow from the addends."""
    one.grid.largest.zero_()
    for addend in addends:
        one.bucket.views[0].copy_(addend)
        one.bucket.look()
    one.grid.follow_addends([one.bucket])
    return again(one, addends)


def again(one: One, addends: list[torch.Tensor]) -> torch.Tensor:
    assert misfits(one, addends) == 0
    one.bucket.total()
    one.grid.follow_sums()
    return one.bucket.views[0].clone()


def misfits(one: One, addends: list[torch.Tensor]) -> int:
    one.bucket.start()
    for addend in addends:
        one.bucket.views[0].copy_(addend)
        one.bucket.add()
    one.bucket.send()
    return int(one.bucket.receive())


@pytest.mark.parametrize("count", [1, 2, 5, 512])
def test_the_sum_is_the_same_bits_in_any_order(count):
    torch.manual_seed(0)
    addends = [*torch.randn(count, 3 * BLOCK)]
    first = total(One(count), addends)
    assert torch.equal(first, total(One(count), addends[::-1]))
    exact = torch.stack(addends).double().sum(0)
    rounding = 8 * 2.0 ** -Digits.of(count).total * math.sqrt(count)
    assert rounding < 4e-4
    assert (first - exact).abs().max() < rounding * exact.abs().max()


def test_each_block_keeps_its_digits_beside_one_that_is_larger_by_2_to_the_40th():
    torch.manual_seed(0)
    scales = torch.tensor([2.0**20, 1.0, 2.0**-20]).repeat_interleave(BLOCK)
    addends = [scales * torch.randn(3 * BLOCK) for _ in range(4)]
    found, exact = total(One(4), addends), torch.stack(addends).double().sum(0)
    for block, expected in zip(found.split(BLOCK), exact.split(BLOCK), strict=True):
        assert (block - expected).abs().max() < 2e-6 * expected.abs().max()


def test_a_block_that_had_nothing_is_as_its_bucket():
    addend = torch.zeros(3 * BLOCK)
    addend[:BLOCK] = 1.0
    one = One(2)
    total(one, [addend])
    assert torch.equal(again(one, [addend.roll(BLOCK)]), addend.roll(BLOCK))


@pytest.mark.parametrize("grown", [2.0**8, 2.0**40, math.inf, -math.inf, math.nan])
def test_what_does_not_fit_is_said(grown):
    one, addend = One(1), torch.ones(3 * BLOCK)
    total(one, [addend])
    addend[7] = grown
    assert misfits(one, [addend]) == 1


def test_numbers_follow_the_sum_at_once_upwards_and_bit_by_bit_downwards():
    one, addend = One(1), torch.ones(3 * BLOCK)
    total(one, [addend])
    before = one.grid.exponents.clone()
    for factor, change in ((32, 5), (1 / 1024, 4), (0, 4)):  # nothing to follow in the last
        again(one, [factor * addend])
        assert torch.equal(one.grid.exponents, before + change)


def test_buckets_are_those_of_the_network_alone_and_keep_how_its_tensors_lie():
    weight = nn.Parameter(torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last))
    tensors = [weight, nn.Parameter(torch.zeros(1 << 19)), nn.Parameter(torch.zeros(()))]
    _, (first, second) = buckets_of(tensors, Digits.of(2), more=4)
    assert [view.shape for view in first.views] == [()]
    assert [view.shape for view in second.views] == [(1 << 19,), (8, 3, 5, 5)]
    assert second.views[-1].stride() == weight.stride()
    assert (len(first.more), len(second.more)) == (4, 0)
