"""What the probe takes for the same: numbers that differ by rounding, whatever their sizes."""

import numpy as np
import pytest
import torch

from flyte_ddp.engine.checks.trials import TOLERANCE, _really_draws, as_input_error, is_close

SPREAD = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(64, 100, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_rounding_is_none_of_its_business_and_all_else_is(size):
    numbers = SPREAD * size
    numbers[0] = 1e-9 * size  # the difference of two that are not near 0
    assert is_close(numbers, numbers + 3e-6 * size * NOISE, TOLERANCE)
    assert not is_close(numbers, numbers + 0.03 * size * NOISE, TOLERANCE)
    assert not is_close(numbers, numbers - 0.03 * numbers.mean(0) - 0.01 * size, TOLERANCE)


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_a_mask_hides_nothing(mask):
    numbers = SPREAD.masked_fill(torch.ones(64, 100).triu().bool(), mask)
    assert is_close(numbers, numbers + 3e-6 * NOISE, TOLERANCE)
    assert not is_close(numbers, numbers + 0.03 * NOISE, TOLERANCE)


def test_whole_numbers_are_the_same_or_not():
    labels = torch.arange(10)
    assert is_close(labels, labels.clone(), TOLERANCE)
    assert not is_close(labels, labels.flip(0), TOLERANCE)
    assert not is_close(labels, labels[:5], TOLERANCE)


def test_probabilities_in_a_tensor_draw_and_a_dropout_of_zero_does_not():
    mask = torch.zeros(3)
    assert _really_draws(torch.ops.aten.bernoulli_.Tensor, (mask, torch.full((3,), 0.5)), {})
    assert not _really_draws(torch.ops.aten.native_dropout.default, (mask, 0.0, True), {})


def test_memory_that_is_too_short_is_no_fault_of_the_recipe():
    with pytest.raises(MemoryError, match="Unable to allocate"), as_input_error("pictures() fails", "none"):
        np.empty(1 << 58, np.float64)
