"""Sums that do not depend on the order of their addends, and the error bound that they keep."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flyte_ddp.engine.virtual_ranks.whole_numbers import BLOCK, Bucket, Units, group_tensors

SHAPES = [(7, 3), (5, 130), (200,), (3, 2, 5), ()]
BOUND, NO_UNIT = 2.0**-12, 2.0**-127
STEPS = 8


@pytest.fixture(autouse=True, scope="module")
def alone():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Sums:
    """Steps of sums on one rank, as ExactStep computes them.

    Attributes:
        repeated: the number of steps that were computed again.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], addends: int):
        self.buckets = [Bucket(group) for group in group_tensors([torch.zeros(shape) for shape in shapes])]
        self.units = Units(self.buckets, addends)
        self.repeated, self.exponents = 0, self.units.exponents

    def step(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums of the parts' tensors."""
        self.units.use(self.exponents)
        self.add(parts)
        if not self.units.keep_bound():
            self.repeated += 1
            assert self.units.refit_units()
            self.add(parts)
            assert self.units.keep_bound()
        for bucket in self.buckets:
            bucket.total()
        self.exponents = self.units.next_exponents()
        return [view.clone() for view in self._views()]

    def add(self, parts: Sequence[Sequence[Tensor]]) -> None:
        for bucket in self.buckets:
            bucket.start()
        for part in parts:
            for view, addend in zip(self._views(), part, strict=True):
                view.copy_(addend)
            for bucket in self.buckets:
                bucket.add()
        self.units.write_words()

    def _views(self) -> list[Tensor]:
        return [view for bucket in self.buckets for view in bucket.views][::-1]


def check(sums: Sums, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sums, which must keep the bound."""
    found = sums.step(parts)
    for total, *addends in zip(found, *parts, strict=True):
        exact = torch.stack(addends).double()
        error = (total - exact.sum(0)).abs()
        # the sum itself is rounded to float32
        allowed = len(parts) * max(BOUND * exact.abs().max().item(), NO_UNIT) + total.double().abs() * 2.0**-24
        assert (error <= allowed).all()
        if len(parts) == 1 and total.ndim > 1:  # rows whose largest number is at least the least unit
            is_large = exact[0].abs().flatten(1).amax(1) >= 2.0**-126
            assert total.flatten(1).any(1)[is_large].all()
    return found


SCALES = {
    "spike": lambda step: 2.0**40 if step == 2 else 1.0,
    "fall": lambda step: 2.0**-40 if step == 2 else 1.0,
    "alternating": lambda step: 2.0 ** (-30 * (step % 2)),
    "zeros": lambda step: float(not 2 <= step <= 4),
    "decay": lambda step: 1.5 ** (-8 * step),
    "growth": lambda step: 1.5 ** (8 * step),
    "denormal": lambda step: 2.0 ** (-115 - 5 * step),
    "huge": lambda step: 2.0 ** (70 + 7 * step),
}


def alike(parts: list[list[Tensor]]) -> None:
    """Make all addends positive, so that sums are as large as they can be."""
    for part in parts:
        part[:] = [one.abs() for one in part]


def cancelling(parts: list[list[Tensor]]) -> None:
    """Make each other addend cancel the one before, up to rounding."""
    for number in range(1, len(parts), 2):
        parts[number] = [one * -(1 + 2.0**-20) for one in parts[number - 1]]


def rare(parts: list[list[Tensor]]) -> None:
    """Leave few rows, as tokens or experts that are seldom used, of very different sizes."""
    for part in parts:
        for one in part[:2]:
            one *= (torch.rand(len(one), 1) < 0.2) * 2.0 ** torch.randint(-40, 1, (len(one), 1))


def routed(parts: list[list[Tensor]]) -> None:
    """Give each tensor, as a mixture's expert, to one part, or to none in this step; their sizes differ."""
    for number in range(len(parts[0])):
        chosen = int(torch.randint(len(parts) + 1, ()))
        for place, part in enumerate(parts):
            part[number] = part[number] * (2.0 ** int(torch.randint(-20, 1, ())) if place == chosen else 0.0)


def in_bfloat16(parts: list[list[Tensor]]) -> None:
    for part in parts:
        part[:] = [one.bfloat16().float() for one in part]


@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    count=st.sampled_from([1, 2, 5]),
    change=st.sampled_from([alike, cancelling, rare, routed, in_bfloat16, lambda _: None]),
)
def test_sums_keep_the_bound_and_have_the_same_bits_in_any_order(scale, seed, count, change):
    torch.manual_seed(seed)
    sums, reversed_sums = Sums(SHAPES, count), Sums(SHAPES, count)
    for step in range(STEPS):
        parts = [[SCALES[scale](step) * torch.randn(shape) for shape in SHAPES] for _ in range(count)]
        change(parts)
        found, other = check(sums, parts), reversed_sums.step(parts[::-1])
        assert all(torch.equal(one, two) for one, two in zip(found, other, strict=True))
        assert torch.equal(sums.exponents, reversed_sums.exponents)


@pytest.mark.parametrize("change", [alike, lambda _: None])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 512])
def test_gradients_that_change_little_are_added_up_once(count, change):
    torch.manual_seed(0)
    sums = Sums([(4, 64), (70,)], count)
    for step in range(3):
        parts = [[0.7**step * torch.randn(4, 64), 0.7**step * torch.randn(70)] for _ in range(count)]
        change(parts)
        check(sums, parts)
    assert sums.repeated <= 1  # the first step has no sum to go by


def test_a_steady_decay_is_followed_without_a_repetition():
    sums = Sums([(64,)], 4)
    found = [sums.step([[torch.full((64,), 1.5**-step)]] * 4)[0][0].item() for step in range(150)]
    assert sums.repeated == 0
    assert all(math.isclose(one, 4 * 1.5**-step, rel_tol=2.0**-11) for step, one in enumerate(found))


def test_a_row_that_would_become_0_beside_larger_ones_gets_a_unit_of_its_own():
    sums, rows = Sums([(3, 8)], 2), torch.ones(3, 8)
    check(sums, [[rows], [rows]])
    rows[1] = 2.0**-50
    (total,) = check(sums, [[rows], [0 * rows]])
    assert torch.equal(total, rows)
    assert sums.repeated == 1
    check(sums, [[rows], [rows]])
    assert sums.repeated == 1


def test_rows_that_come_late_and_go_need_no_repetition():
    sums, rows = Sums([(3, 8), (100,)], 2), torch.ones(3, 8)
    for step in range(30):
        rows[2] = 0.25 * (step % 7 == 3)
        check(sums, [[rows, torch.zeros(100)], [rows, torch.zeros(100)]])
    assert sums.repeated == 0


def test_what_is_0_everywhere_passes():
    sums = Sums(SHAPES, 2)
    for _ in range(3):
        assert not any(total.any() for total in check(sums, [[torch.zeros(shape) for shape in SHAPES]] * 2))
    assert sums.repeated == 0


@pytest.mark.parametrize("grown", [2.0**40, math.inf, -math.inf, math.nan])
def test_what_does_not_fit_is_said(grown):
    sums, addend = Sums([(3, BLOCK)], 1), torch.ones(3, BLOCK)
    sums.step([[addend]])
    addend[1, 7] = grown
    sums.units.use(sums.exponents)
    sums.add([[addend]])
    assert not sums.units.fit()
    assert not sums.units.keep_bound()
    assert sums.units.refit_units() == math.isfinite(grown)


def test_nothing_can_be_added_up_too():
    total, other = Sums([(0,), (0, 5)], 2).step([[torch.zeros(0), torch.zeros(0, 5)]])
    assert total.shape == (0,)
    assert other.shape == (0, 5)


def test_buckets_are_those_of_the_network_alone_and_keep_how_its_tensors_lie():
    weight = nn.Parameter(torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last))
    tensors = [weight, nn.Parameter(torch.zeros(1 << 19)), nn.Parameter(torch.zeros(()))]
    first, second = (Bucket(group) for group in group_tensors(tensors))
    units = Units([first, second], 2)
    assert [view.shape for view in first.views] == [()]
    assert [view.shape for view in second.views] == [(1 << 19,), (8, 3, 5, 5)]
    assert second.views[-1].stride() == weight.stride()
    assert len(units.exponents) == 1 + (1 << 19) // BLOCK + 8
