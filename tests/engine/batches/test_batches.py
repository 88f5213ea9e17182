"""Where samples may come from: tensors, memory maps and Datasets; and what cannot be samples."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from flyte_ddp.engine.batches import batches, splits
from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.errors import DataError, InputError

CPU = torch.device("cpu")
PARTS = [3, 2]


class Squares(Dataset):
    """Seven samples, as a dict of a tensor, an array and a number."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        return {"row": torch.full((2,), index**2), "array": np.float32(index), "number": (index,)}


class Broken(Squares):
    def __getitem__(self, index):
        return [1, 2, 3][index]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((torch.zeros(3, 2), np.zeros(4)), r"as many in all tensors, got \(3, 2\), \(4,\)"),
        ((torch.zeros(0, 4), torch.zeros(0)), r"the split is empty, .* its tensors are \(0, 4\), \(0,\)"),
        ((torch.zeros(0, 2), torch.zeros(3)), r"first dimension has to be the samples.* got \(0, 2\), \(3,\)"),
        (torch.tensor(1.0), r"first dimension has to be the samples.* got \(\)"),
        ((), "got no tensors"),
        (["a", "b"], "tensors, arrays or a Dataset, got str"),
        (torch.tensor([0.0, 1.0, torch.nan]), "sample 2 has a NaN or infinite value"),
        ({"x": torch.zeros(4), "y": torch.eye(4) / torch.tensor([1, 1, 0, 1])}, "sample 0 has a NaN"),
        (torch.zeros(4, 2, 2).index_fill(0, torch.tensor([3]), torch.inf), "sample 3 has a NaN or infinite value"),
    ],
)
def test_what_cannot_be_samples_is_refused(data, words):
    with pytest.raises(InputError, match=words):
        Resident(data, CPU)


def test_tensors_keep_their_structure():
    split = Resident({"x": torch.arange(10).view(5, 2), "y": [np.arange(5.0)]}, CPU)
    assert len(split) == 5
    batches = list(split.fetch(torch.tensor([4, 0, 2, 1, 3]).split(PARTS)))
    assert [batch["x"].tolist() for batch in batches] == [[[8, 9], [0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [batch["y"][0].tolist() for batch in batches] == [[4, 0, 2], [1, 3]]


def test_memory_maps_stay_on_disk(tmp_path):
    rows = 10**8  # 800 GB, were it read
    data = np.memmap(tmp_path / "rows", np.float64, "w+", shape=(rows, 1000))
    data[7] = data[rows - 1] = 1.5
    split = Resident((data, np.memmap(tmp_path / "labels", np.int64, "w+", shape=(rows,))), CPU)
    assert len(split) == rows
    ((found, labels),) = split.fetch([torch.tensor([7, 8, rows - 1])])
    assert found.mean(1).tolist() == [1.5, 0, 1.5]
    assert labels.tolist() == [0, 0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_fetched_back_from_a_device(tmp_path, workers):
    """A tensor on the device meta has a shape and no content: what looks at that fails."""
    device = torch.device("meta")
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(7, 3))
    resident, streamed = Resident({"x": torch.zeros(7, 2), "rows": rows}, device), Streamed(Squares(), device, workers)
    for split in (resident, streamed):
        train, test = (
            batches.TrainBatches(split, 4, 1, 0, 2, passes=2),
            batches.EvaluationBatches(split, 4, 1, 2, mixed=True),
        )
        found = [*train.epoch(0), *test]
        leaves = [leaf for batch in found for leaf in pytree.tree_leaves(batch.tree)]
        assert {leaf.device for leaf in leaves} == {device}
        assert [batch.share.count for batch in found] == [2, 2, 2, 1, 2, 1]
        assert [len(batch.tree["x" if split is resident else "row"]) for batch in found] == [2, 2, 2, 1, 2, 1]
        for part in splits.hold_out(split, 0.3):
            (tree,) = part.fetch([torch.tensor([1, 0])])
            assert {(len(leaf), leaf.device) for leaf in pytree.tree_leaves(tree)} == {(2, device)}


def test_each_step_draws_its_own_numbers_and_each_pass_has_its_own_order():
    drawn = []

    def augment(tree, seed, share, epoch):
        drawn.append(seed)
        return tree

    train = batches.TrainBatches(Resident(torch.arange(8), CPU), 4, 1, 0, 1, passes=2, augment=augment)
    epochs = [[*train.epoch(number)] for number in range(2)]
    drawn += [batch.seed for epoch in epochs for batch in epoch]
    assert len(drawn) == len({*drawn}) == 2 * 2 * 4
    orders = [torch.cat([batch.tree for batch in epoch]).tolist() for epoch in epochs]
    passes = [order[first : first + 8] for order in orders for first in (0, 8)]
    assert all(sorted(one) == [*range(8)] != one for one in passes)
    assert len({str(one) for one in passes}) == 4
    (resumed,) = train.epoch(1, first_step=3)
    assert (resumed.seed, resumed.tree.tolist()) == (epochs[1][3].seed, passes[3][4:])


def test_a_rank_without_a_sample_of_a_short_batch_borrows_the_last_one_before_it():
    ranks = [batches.EvaluationBatches(Resident(torch.arange(6), CPU), 4, rank, 3) for rank in range(3)]
    last = [list(rank)[-1] for rank in ranks]
    assert [batch.tree.tolist() for batch in last] == [[4], [5], [5]]
    assert [(batch.share.first, batch.share.count) for batch in last] == [(0, 1), (1, 1), (1, 1)]
    assert [batch.share.own(batch.tree).tolist() for batch in last] == [[4], [5], []]
    cuts = [[samples[slice(*own)].tolist() for samples, own in rank.whole()] for rank in ranks]
    assert cuts == [[[0, 1], [4]], [[2], [5]], [[3], []]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_read_sample_by_sample(workers):
    split = Streamed(Squares(), CPU, workers)
    order = torch.tensor([6, 0, 2, 1, 3])
    batches = list(split.fetch(order.split(PARTS)))
    assert [batch["row"].tolist() for batch in batches] == [[[36, 36], [0, 0], [4, 4]], [[1, 1], [9, 9]]]
    assert [batch["array"].tolist() for batch in batches] == [[6, 0, 2], [1, 3]]
    assert [batch["number"][0].tolist() for batch in batches] == [[6, 0, 2], [1, 3]]
    assert {batch["row"].dtype for batch in batches} == {torch.int64}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_is_named_by_file_and_line(workers):
    line = Broken.__getitem__.__code__.co_firstlineno + 1
    with pytest.raises(DataError, match=rf'test_batches\.py", line {line}, in __getitem__(?s:.)*IndexError'):
        list(Streamed(Broken(), CPU, workers).fetch(torch.arange(5).split(PARTS)))


class Numbers(Dataset):
    """A billion samples."""

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return index


def test_samples_from_all_over_a_billion_are_theirs_and_reach_the_last():
    for count in (1, 2, 8, 1024):
        chosen = splits.spread(Streamed(Numbers(), CPU), count).tolist()
        assert chosen == [number * (10**9 - 1) // max(1, count - 1) for number in range(count)]


def test_an_epoch_of_a_billion_samples_begins_at_once_wherever_it_begins():
    kept, held = splits.hold_out(Streamed(Numbers(), CPU), 0.01)
    assert (len(kept), len(held)) == (990_000_000, 10_000_000)
    train = batches.TrainBatches(kept, 64, 1, 3, 4, passes=2)
    first, *_ = (batch.tree for batch, _ in zip(train.epoch(0), range(2), strict=False))
    later = next(train.epoch(0, first_step=20_000_000)).tree  # in the second pass
    validation = next(iter(batches.EvaluationBatches(held, 64, 3, 4, mixed=True))).tree
    assert len({*first.tolist(), *later.tolist(), *validation.tolist()}) == 48
    assert max(later.tolist()) < 10**9
