"""Sums that do not depend on the order of their addends."""

import math

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flyte_ddp.engine.virtual_ranks.whole_numbers import BLOCK, FALL, Bucket, Digits, buckets_of


@pytest.fixture(autouse=True, scope="module")
def alone():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def bucket_of(addends: int, size: int = 3 * BLOCK) -> Bucket:
    return Bucket([torch.zeros(size)], Digits.of(addends))


def total(bucket: Bucket, addends: list[torch.Tensor]) -> torch.Tensor:
    """With numbers that follow from the addends."""
    bucket.largest.zero_()
    for addend in addends:
        bucket.views[0].copy_(addend)
        bucket.look()
    bucket.expect(bucket.largest)
    return again(bucket, addends)


def again(bucket: Bucket, addends: list[torch.Tensor]) -> torch.Tensor:
    bucket.start()
    for addend in addends:
        bucket.views[0].copy_(addend)
        bucket.add()
    bucket.send()
    assert not bucket.receive().any()
    bucket.total()
    return bucket.views[0].clone()


@pytest.mark.parametrize("count", [1, 2, 5, 512])
def test_the_sum_is_the_same_bits_in_any_order(count):
    torch.manual_seed(0)
    addends = [*torch.randn(count, 3 * BLOCK)]
    first = total(bucket_of(count), addends)
    assert torch.equal(first, total(bucket_of(count), addends[::-1]))
    exact = torch.stack(addends).double().sum(0)
    rounding = 8 * 2.0 ** -Digits.of(count).total * math.sqrt(count)
    assert rounding < 4e-4
    assert (first - exact).abs().max() < rounding * exact.abs().max()


def test_each_block_keeps_its_digits_beside_one_that_is_larger_by_2_to_the_40th():
    torch.manual_seed(0)
    scales = torch.tensor([2.0**20, 1.0, 2.0**-20]).repeat_interleave(BLOCK)
    addends = [scales * torch.randn(3 * BLOCK) for _ in range(4)]
    found, exact = total(bucket_of(4), addends), torch.stack(addends).double().sum(0)
    for block, expected in zip(found.split(BLOCK), exact.split(BLOCK), strict=True):
        assert (block - expected).abs().max() < 2e-6 * expected.abs().max()


def test_statistics_keep_their_digits_beside_neighbours_of_any_size_and_seldom_grow_too_much():
    torch.manual_seed(0)
    scales = torch.logspace(-60, 60, 31, base=2)
    addends = [scales * torch.randn(31) for _ in range(512)]
    bucket = Bucket([torch.zeros(31)], Digits.wide(512))
    exact = torch.stack(addends).double().sum(0)
    assert ((total(bucket, addends) - exact) / exact).abs().max() < 2e-7
    assert ((again(bucket, [2.0**16 * addend for addend in addends]) / 2.0**16 - exact) / exact).abs().max() < 2e-7


def test_nothing_can_be_added_up_too():
    bucket = Bucket([torch.zeros(0)], Digits.wide(2), more=2)
    assert total(bucket, [torch.zeros(0)]).shape == (0,)


def test_a_block_that_had_nothing_is_as_its_bucket():
    addend = torch.zeros(3 * BLOCK)
    addend[:BLOCK] = 1.0
    bucket = bucket_of(2)
    total(bucket, [addend])
    assert torch.equal(again(bucket, [addend.roll(BLOCK)]), addend.roll(BLOCK))


@pytest.mark.parametrize("grown", [2.0**8, 2.0**40, math.inf, -math.inf, math.nan])
def test_what_does_not_fit_is_said(grown):
    bucket, addend = bucket_of(1), torch.ones(3 * BLOCK)
    total(bucket, [addend])
    bucket.start()
    bucket.views[0].copy_(addend)
    bucket.views[0][7] = grown
    bucket.add()
    bucket.send()
    assert bucket.receive().item() == 1


def test_numbers_follow_the_sum_at_once_upwards_and_slowly_downwards():
    bucket, addend = bucket_of(1), torch.ones(3 * BLOCK)
    total(bucket, [addend])
    before = bucket.exponents.clone()
    again(bucket, [32 * addend])
    assert torch.equal(bucket.exponents, before + 5 * FALL)
    again(bucket, [addend / 1024])
    assert torch.equal(bucket.exponents, before + 5 * FALL - 1)
    again(bucket, [0 * addend])
    assert torch.equal(bucket.exponents, before + 5 * FALL - 1)  # nothing to follow


def test_buckets_are_those_of_the_network_alone_and_keep_how_its_tensors_lie():
    weight = nn.Parameter(torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last))
    tensors = [weight, nn.Parameter(torch.zeros(1 << 19)), nn.Parameter(torch.zeros(()))]
    first, second = buckets_of(tensors, Digits.of(2))
    assert [view.shape for view in first.views] == [()]
    assert [view.shape for view in second.views] == [(1 << 19,), (8, 3, 5, 5)]
    assert second.views[-1].stride() == weight.stride()
