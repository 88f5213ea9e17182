"""Batches of blocks in this process, rank by rank: whatever their shape, each sample once and in the same order."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from flyte_ddp.data.blocks.blocks import Blocks
from flyte_ddp.engine.batches import batches
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.block_split import BlockSplit
from flyte_ddp.engine.batches.splits import hold_out, spread
from flyte_ddp.launch.environment import Environment, World

CPU = torch.device("cpu")


@pytest.fixture
def split_of(tmp_path, monkeypatch):
    """split_of(lengths, window, streams): its samples are their own numbers."""
    monkeypatch.setenv("DDP_CACHE_DIR", str(tmp_path))
    with BlockCache(Environment(World(1, 1, "gloo", "cpu"), 0, 0, "", 1), 10**9) as cache:
        made = iter(range(10**9))

        def split(lengths, window=8, streams=4):
            starts = np.cumsum(lengths) - lengths
            blocks = Blocks(lengths, lambda number: np.arange(lengths[number]) + starts[number])
            blocks.window, blocks.streams = window, streams
            return BlockSplit(blocks, f"split{next(made)}", cache, CPU)

        yield split


@settings(max_examples=40, deadline=None)
@given(data=some.data())
def check_any_shape(split_of, data):
    lengths = data.draw(some.lists(some.integers(1, 9), min_size=1, max_size=12))
    batch_size, window, streams = (data.draw(some.integers(1, 12)) for _ in range(3))
    world = data.draw(some.integers(1, min(4, batch_size)))
    fraction, first = data.draw(some.sampled_from([1.0, 0.6])), data.draw(some.integers(0, 3))
    split = split_of(lengths, window, streams)

    def epoch(rank, ranks, first_step=0):
        train = TrainBatches(split, batch_size, 3, rank, ranks, 1, fraction)
        return [batch.share.own(batch.tree).tolist() for batch in train.epoch(1, first_step)]

    def evaluated(rank, ranks):
        return [
            batch.share.own(batch.tree).tolist() for batch in batches.EvaluationBatches(split, batch_size, rank, ranks)
        ]

    for read in (epoch, evaluated):
        alone = read(0, 1)
        samples = [sample for batch in alone for sample in batch]
        assert (
            len(set(samples))
            == len(samples)
            == (round(sum(lengths) * fraction) or 1 if read is epoch else sum(lengths))
        )
        parts = [read(rank, world) for rank in range(world)]
        assert [[*itertools.chain(*shares)] for shares in zip(*parts, strict=True)] == alone
    assert epoch(0, 1, first) == epoch(0, 1)[first:]


def test_any_shape(split_of):
    check_any_shape(split_of)


def test_whole_blocks_are_held_out(split_of):
    kept, held = hold_out(split_of([3] * 20), 0.25)
    found = [next(part.fetch([torch.arange(len(part))])).tolist() for part in (kept, held)]
    assert [len(one) for one in found] == [45, 15]
    assert sorted(found[0] + found[1]) == list(range(60))
    assert {sample // 3 for sample in found[0]}.isdisjoint(sample // 3 for sample in found[1])


@pytest.mark.parametrize("lengths", [[1000] * 50, [1] * 100, [5000], [9, 1, 1, 1]])
def test_samples_from_all_over_a_split_are_from_few_blocks(split_of, lengths):
    split = split_of(lengths)
    for count in (1, 8, min(1024, len(split))):
        chosen = spread(split, count)
        assert len(chosen) == count
        assert next(split.fetch([chosen])).tolist() == chosen.tolist()
        assert len(set(split.find_blocks(chosen.numpy()).tolist())) <= max(4, 2 * count / np.median(lengths))
