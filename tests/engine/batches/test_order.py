"""An order that is computed position by position is a permutation, and as random as a list that is shuffled."""

import itertools

import numpy as np
import pytest
import torch

from flyte_ddp.engine.batches import order
from flyte_ddp.random_numbers import Use, derive_key


def shuffled(positions, size, key):
    return order.shuffled(torch.from_numpy(positions), size, key).numpy()


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 1000, 4096, 4097, 60_000])
def test_it_is_a_permutation_whatever_the_size_and_however_it_is_cut(size):
    whole = shuffled(np.arange(size), size, derive_key(Use.PASS, size))
    assert np.array_equal(np.sort(whole), np.arange(size))
    third = np.arange(size // 3, size)
    assert np.array_equal(shuffled(third, size, derive_key(Use.PASS, size)), whole[third])


def test_a_few_of_billions_are_found_at_once():
    size = 10**12 + 39
    found = shuffled(np.arange(size - 1000, size), size, derive_key(Use.PASS, 1))
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() < found.max() < size


@pytest.mark.parametrize("size", [5, 12, 16])
def test_each_sample_is_equally_often_at_each_position(size):
    orders = 100 * size
    counts = np.zeros((size, size))
    for key in range(orders):
        counts[np.arange(size), shuffled(np.arange(size), size, derive_key(Use.PASS, key))] += 1
    chi_squared, freedom = ((counts - 100) ** 2 / 100).sum(), (size - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5


def test_all_orders_of_four_come_about():
    orders = {tuple(shuffled(np.arange(4), 4, derive_key(Use.PASS, key)).tolist()) for key in range(1000)}
    assert len(orders) == 24


@pytest.mark.parametrize("size", [1000, 1024, 60_000])
def test_it_is_as_random_as_a_list_that_is_shuffled(size):
    """Standard deviations from what is expected of a random order: places kept, neighbours that stay neighbours, rising
    steps, correlation with where the samples were, and with another key's order."""
    orders = [shuffled(np.arange(size), size, derive_key(Use.PASS, key)) for key in range(20)]
    places, root = np.arange(size), size**0.5
    kept = sum((order == places).sum() for order in orders)
    assert abs(kept - 20) < 5 * 20**0.5
    neighbours = sum((np.abs(np.diff(order)) == 1).sum() for order in orders)
    assert abs(neighbours - 40) < 5 * 80**0.5
    for one, other in itertools.pairwise(orders):
        assert abs((np.diff(one) > 0).sum() - size / 2) < 5 * (size / 12) ** 0.5
        assert abs(np.corrcoef(one, places)[0, 1]) < 5 / root
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / root
        classes = np.array_split(one, 10)  # in data that are sorted by class: what a part of an epoch has of the first
        counts = [(part < size / 10).sum() for part in classes]
        assert max(abs(count - size / 100) for count in counts) < 5 * (size / 100) ** 0.5


def test_several_orders_at_once():
    one, two, three = (derive_key(Use.PASS, number) for number in (1, 2, 3))
    sizes, keys = np.array([5, 40, 5, 1, 40, 17]), np.array([one, two, one, 0, three, two])
    positions = np.array([3, 39, 0, 0, 0, 11])
    each = [shuffled(*(of[one : one + 1] for of in (positions, sizes, keys)))[0] for one in range(6)]
    assert shuffled(positions, sizes, keys).tolist() == each
    assert each == [int(shuffled(positions[i : i + 1], int(sizes[i]), int(keys[i]))[0]) for i in range(6)]
