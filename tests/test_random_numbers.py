"""Random numbers by position: the same however they are cut, uniform, and independent of their neighbours."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.feature_selection import f_regression
from torch import Tensor

from flyte_ddp import random_numbers
from flyte_ddp.random_numbers import Use, derive_key, integers, normal, split_mix, uniform, words

CPU = torch.device("cpu")
COUNT = 1 << 16
DRAWS: dict[str, Callable[..., Tensor]] = {
    "words": words,
    "uniform": uniform,
    "normal": normal,
    "integers": partial(integers, low=-3, high=10),
}


@pytest.fixture(params=["of a CPU", "of other devices"], autouse=True)
def stream(request, monkeypatch):
    """Try both streams: split_mix is what any device but a CPU draws."""
    if request.param == "of other devices":
        monkeypatch.setattr(random_numbers, "words", split_mix)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("first", "count"), [(0, 9), (1, 1), (3, 8), (7, 1000), (10, 0), ((1 << 40) + 5, 30)])
def test_a_part_is_the_same_as_in_the_whole(name, first, count):
    start = first - first % 64
    whole = DRAWS[name](5, start, first - start + count, CPU)
    assert torch.equal(DRAWS[name](5, first, count, CPU), whole[first - start :])


def test_numbers_keep_within_their_bounds():
    drawn = uniform(1, 0, COUNT, CPU)
    assert drawn.dtype == torch.float32
    assert 0 <= drawn.min() < drawn.max() < 1
    assert set(integers(1, 0, COUNT, CPU, -3, 10).tolist()) == set(range(-3, 10))
    assert normal(1, 0, COUNT, CPU).abs().max() < 5.8


def deviations(observed, expected, variance):
    """By how many standard errors a mean of COUNT numbers is off."""
    return abs(observed - expected) / (variance / COUNT) ** 0.5


def test_moments_are_right():
    drawn, gauss = uniform(2, 0, COUNT, CPU).double(), normal(2, 0, COUNT, CPU).double()
    assert deviations(drawn.mean(), 1 / 2, 1 / 12) < 4
    assert deviations(drawn.square().mean(), 1 / 3, 4 / 45) < 4
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert deviations((gauss**power).mean(), moment, variance) < 4


def test_values_are_equally_frequent():
    for drawn, bins in ((uniform(4, 0, COUNT, CPU) * 256, 256), (integers(4, 0, COUNT, CPU, 0, 100), 100)):
        counts = torch.bincount(drawn.long(), minlength=bins).double()
        chi_squared = ((counts - COUNT / bins) ** 2 / (COUNT / bins)).sum()
        assert abs(chi_squared - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


def test_neighbours_calls_and_steps_are_independent():
    """Also where keys and positions differ as little as can be: neighbouring rows, calls and steps."""
    streams = [
        uniform(derive_key(Use.CALL, seed, call), 0, COUNT, CPU).numpy()
        for seed, call in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    streams += [np.roll(streams[0], lag) for lag in (1, 2, 3, 4, 64, 1000)]
    for number, one in enumerate(streams):
        _, chances = f_regression(np.stack(streams[:number] + streams[number + 1 :], 1), one)
        assert chances.min() > 1e-5
    bits = [np.unpackbits(stream.view(np.uint8)) for stream in (s for s in streams[:4])]
    assert all(abs((a == b).mean() - (bits[0] == bits[1]).mean()) < 0.01 for a in bits for b in bits if a is not b)


def test_no_two_uses_or_positions_have_the_same_key():
    """Also where a position ends with zeros, or has a number of more bits than a word of the machine."""
    numbers = (0, 1, 2, 1 << 32, (1 << 32) + 1, (1 << 64) - 1)
    positions = [(), *((a,) for a in numbers), *((a, b) for a in numbers for b in numbers), (0, 0, 0), (0, 0, 0, 0)]
    keys = {derive_key(use, *position) for use in Use for position in positions}
    assert len(keys) == len(Use) * len(positions)
