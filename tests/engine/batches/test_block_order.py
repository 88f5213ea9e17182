"""The order over blocks: each sample once, alike for any ranks, and no block needed outside of what is announced."""

import numpy as np
import pytest
import torch

from flyte_ddp.engine.batches.batches import rank_slice
from flyte_ddp.engine.batches.block_order import BlockOrder
from flyte_ddp.random_numbers import Use, derive_key

UNEVEN = [5, 1, 7, 3, 3, 9, 2, 4, 6, 8, 1, 1]  # 50 samples


def order_of(lengths=UNEVEN, key=7, batch_size=8, window=6, streams=4, samples=0):
    lengths = np.array(lengths)
    return BlockOrder(lengths, key, batch_size, samples or int(lengths.sum()), window, streams)


def block_of(order, samples):
    return np.searchsorted(np.cumsum(order.lengths), samples.numpy(), side="right")


def steps_of(order):
    return [
        torch.arange(start, min(start + order.batch_size, order.samples))
        for start in range(0, order.samples, order.batch_size)
    ]


@pytest.mark.parametrize("key", [None, 1])
@pytest.mark.parametrize("lengths", [UNEVEN, [50], [1] * 50, [25, 25], [3, 3]])
@pytest.mark.parametrize(
    ("batch_size", "window", "streams"), [(8, 6, 4), (7, 1, 3), (64, 100, 5), (3, 2, 32), (1, 4, 1)]
)
def test_each_sample_comes_once_however_the_epoch_is_cut(key, lengths, batch_size, window, streams):
    order = order_of(lengths, key, batch_size, window, streams)
    whole = order.at(torch.arange(order.samples))
    assert whole.sort()[0].tolist() == list(range(order.samples))
    pieces = [order.at(one) for step in steps_of(order) for one in step.tensor_split(3) if len(one)]
    assert torch.equal(torch.cat(pieces), whole)


def test_keys_and_windows_make_other_orders():
    orders = [order_of(key=key, window=window) for key in (1, 2) for window in (2, 6)]
    assert len({tuple(order.at(torch.arange(50)).tolist()) for order in orders}) == 4
    assert order_of(key=None, streams=1).at(torch.arange(50)).tolist() == list(range(50))


@pytest.mark.parametrize("key", [None, 1])
@pytest.mark.parametrize("samples", [50, 33])
@pytest.mark.parametrize(
    ("batch_size", "window", "streams"), [(8, 6, 4), (7, 1, 3), (5, 3, 4), (64, 100, 5), (9, 4, 1)]
)
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_node_needs_only_the_announced_blocks_at_the_announced_steps(
    key, samples, batch_size, window, streams, nodes
):
    order = order_of(UNEVEN, key, batch_size, window, streams, samples)
    for node in range(nodes):
        shares = [step[slice(*rank_slice(0, len(step), node, nodes))] for step in steps_of(order)]
        seen = np.concatenate([order.streams_at(share) for share in shares if len(share)])
        streams = range(seen.min(), seen.max() + 1)
        uses = order.uses(streams, range(len(shares)))
        assert len(set(uses.blocks)) == len(uses.blocks)
        assert (np.diff(uses.first) >= 0).all()
        for step, share in enumerate(shares):
            announced = uses.blocks[(uses.first <= step) & (step <= uses.last)]
            assert set(block_of(order, order.at(share))) <= set(announced) if len(share) else True
        later = order.uses(streams, range(3, 5))
        assert set(later.blocks) == set(uses.blocks[(uses.last >= 3) & (uses.first < 5)])


def test_all_nodes_together_announce_each_block_about_once_and_hold_few_at_a_time():
    order = order_of([100] * 400, batch_size=64, window=300, streams=16)
    halves = [order.uses(streams, range(625)) for streams in (range(8), range(8, 16))]
    assert sum(len(half.blocks) for half in halves) <= 401
    for half in halves:
        held = [((half.first <= step) & (step <= half.last)).sum() for step in range(625)]
        assert max(held) <= 8 * (300 // 100 + 2)


def test_an_epoch_of_a_billion_samples_in_ten_thousand_blocks_begins_anywhere_at_once():
    order = order_of([100_000] * 10_000, batch_size=256, window=8192, streams=32)
    found = order.at(torch.arange(700_000_000, 700_001_024))
    assert len(set(found.tolist())) == 1024
    assert len(order.uses(range(32), range(3_900_000, order.samples)).blocks) < 100


def test_samples_sorted_by_class_come_as_mixed_as_they_can_be():
    """A batch has the share of each class that it has in the data, up to twice the spread of a random order."""
    for epoch in range(3):
        order = order_of([512] * 118, derive_key(Use.PASS, 1, epoch), 64, window=2048, streams=32)
        whole = order.at(torch.arange(order.samples))
        counts = [(step < order.samples // 10).sum().item() for step in whole.split(64)[:-1]]
        assert np.std(counts) < 2 * (64 * 0.1 * 0.9) ** 0.5
        assert abs(np.corrcoef(whole.numpy(), np.arange(order.samples))[0, 1]) < 0.2
