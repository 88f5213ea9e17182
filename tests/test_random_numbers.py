"""Random numbers by position: the same however they are cut, uniform, and independent of their neighbours."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.feature_selection import f_regression
from torch import Tensor

from flyte_ddp import random_numbers
from flyte_ddp.random_numbers import Use, integers, kept, key_of, normal, split_mix, uniform, words

CPU = torch.device("cpu")
COUNT = 1 << 16
DRAWS: dict[str, Callable[..., Tensor]] = {
    "words": words,
    "uniform": uniform,
    "uniform bfloat16": partial(uniform, dtype=torch.bfloat16),
    "normal": normal,
    "integers": partial(integers, low=-3, high=10),
    "kept": partial(kept, p=0.3),
}


@pytest.fixture(params=["of a CPU", "of other devices"], autouse=True)
def stream(request, monkeypatch):
    """Both streams: split_mix is what a GPU without Triton, or any other device, would draw."""
    if request.param == "of other devices":
        monkeypatch.setattr(random_numbers, "words", split_mix)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("first", "count"), [(0, 9), (1, 1), (3, 8), (7, 1000), (10, 0), ((1 << 40) + 5, 30)])
def test_a_part_is_the_same_as_in_the_whole(name, first, count):
    start = first - first % 64
    whole = DRAWS[name](5, start, first - start + count, CPU)
    assert torch.equal(DRAWS[name](5, first, count, CPU), whole[first - start :])


def test_numbers_keep_within_their_bounds():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        drawn = uniform(1, 0, COUNT, CPU, dtype=dtype)
        assert drawn.dtype == dtype
        assert 0 <= drawn.min() < drawn.max() < 1
    assert set(integers(1, 0, COUNT, CPU, -3, 10).tolist()) == set(range(-3, 10))
    assert normal(1, 0, COUNT, CPU).abs().max() < 5.8
    assert kept(1, 0, COUNT, CPU, 0.0).all()
    assert not kept(1, 0, COUNT, CPU, 1.0).any()


def deviations(observed, expected, variance):
    """By how many standard errors a mean of COUNT numbers is off."""
    return abs(observed - expected) / (variance / COUNT) ** 0.5


def test_moments_are_right():
    drawn, gauss = uniform(2, 0, COUNT, CPU).double(), normal(2, 0, COUNT, CPU).double()
    assert deviations(drawn.mean(), 1 / 2, 1 / 12) < 4
    assert deviations(drawn.square().mean(), 1 / 3, 4 / 45) < 4
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert deviations((gauss**power).mean(), moment, variance) < 4
    for p in (0.1, 0.5, 0.9, 1e-3):
        assert deviations(kept(3, 0, COUNT, CPU, p).double().mean(), 1 - p, p * (1 - p)) < 4


def test_values_are_equally_frequent():
    for drawn, bins in ((uniform(4, 0, COUNT, CPU) * 256, 256), (integers(4, 0, COUNT, CPU, 0, 100), 100)):
        counts = torch.bincount(drawn.long(), minlength=bins).double()
        chi_squared = ((counts - COUNT / bins) ** 2 / (COUNT / bins)).sum()
        assert abs(chi_squared - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


def test_neighbours_calls_and_steps_are_independent():
    """Also where keys and positions differ as little as can be: neighbouring rows, calls and steps."""
    streams = [
        uniform(key_of(Use.CALL, seed, call), 0, COUNT, CPU).numpy() for seed, call in ((0, 0), (0, 1), (1, 0), (1, 1))
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
    keys = {key_of(use, *position) for use in Use for position in positions}
    assert len(keys) == len(Use) * len(positions)


KERNEL = """if True:
    import torch
    from flyte_ddp.engine.global_batch.dropout_kernel import Dropout
    from flyte_ddp import random_numbers
    random_numbers.words = random_numbers.split_mix
    key, features = 12345, torch.randn(37, 11, requires_grad=True)
    for p in (0.3, 1.0):
        for first in (0, 7, (1 << 40) + 5):
            features.grad = None
            dropped = Dropout.apply(features, p, key, first)
            dropped.backward(torch.ones_like(dropped))
            mask = random_numbers.kept(key, first, features.numel(), features.device, p).view_as(features)
            mask = mask * random_numbers.threshold_of(p)[1]
            assert torch.equal(dropped, features * mask) and torch.equal(features.grad, mask)
    for dtype in (torch.float32, torch.float16):
        odd = torch.tensor([1.1, -1.1, torch.nan, torch.inf, -torch.inf] * 50, dtype=dtype)
        mask = random_numbers.kept(key, 7, odd.numel(), odd.device, 0.3).to(dtype)
        mask.mul_(random_numbers.threshold_of(0.3)[1])
        found, expected = Dropout.apply(odd, 0.3, key, 7), odd * mask
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num().view(torch.uint8), expected.nan_to_num().view(torch.uint8))
    # of a gradient's gradient, as a penalty on gradients needs
    slopes = torch.ones(37, 11, requires_grad=True)
    (gradient,) = torch.autograd.grad(Dropout.apply(features, 0.3, key, 7), features, slopes, create_graph=True)
    gradient.sum().backward()
    mask = random_numbers.kept(key, 7, features.numel(), features.device, 0.3).view_as(features)
    assert torch.equal(slopes.grad, mask * random_numbers.threshold_of(0.3)[1])
"""


@pytest.mark.slow
def test_the_kernel_for_gpus_drops_what_torchs_operations_would():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNEL], env=environment, check=True)
