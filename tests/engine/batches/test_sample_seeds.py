"""What a Dataset draws is the same on any number of ranks and loader workers, after a resume, and new in each pass."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.lengths import Lengths
from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.batches.splits import hold_out
from flyte_ddp.engine.checks.held_generators import find_held_generators
from flyte_ddp.engine.checks.trials import host_state
from flyte_ddp.errors import DataError
from flyte_ddp.events import RunStarted
from flyte_ddp.recipes.images import ImageClassifier
from tests.small_training import Unplugged, identical, unplug_at

CPU, SIZE, SEED = torch.device("cpu"), 11, 5


class Pictures(Dataset):
    """As people write them: torchvision's transforms of a PIL image, and noise from wherever."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels
        crop = v2.Compose([v2.RandomResizedCrop(16, (0.7, 1)), v2.RandomHorizontalFlip(), v2.RandomRotation(10)])
        self.transform = v2.Compose([v2.ToPILImage(), crop, v2.PILToTensor()])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.transform(torch.as_tensor(self.images[index])).float()
        if random.random() < 0.5:
            image = image * np.random.uniform(0.5, 1)
        noise = torch.randn(2) + np.random.default_rng(torch.initial_seed()).normal()
        image[:, :2, 0] += noise.float()
        return image.clamp(0, 255).to(torch.uint8), self.labels[index]


class Numbers(Dataset):
    """An odd number of draws from each, of which some leave half of what was drawn for the next call."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        drawn = random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()[2], random.random(), np.random.rand()
        return np.array(drawn), index


class Uneven(Numbers):
    """Of the lengths 1 to 4."""

    def __getitem__(self, index):
        return torch.randn(1 + index % 4), index


def pictures():
    return Pictures(np.random.default_rng(0).integers(0, 256, (SIZE, 1, 16, 16), dtype=np.uint8), np.arange(SIZE))


def split_of(dataset, workers=0):
    split = Streamed(dataset, CPU, workers)
    if isinstance(dataset, Uneven):
        split.is_padded = True
        split.lengths = Lengths(1 + np.arange(SIZE) % 4, SIZE, lambda indices: next(iter(split.fetch([indices]))))
    return split


def steps(split, ranks=1, epoch=0, first_step=0, **more):
    """The global batches of an epoch, each put together from the ranks' shares: samples and indices."""
    each = [TrainBatches(split, 4, SEED, rank, ranks, 2, **more).epoch(epoch, first_step) for rank in range(ranks)]
    return [
        tuple(torch.cat([one.share.own(one.tree[leaf]) for one in shares]) for leaf in (0, 1))
        for shares in zip(*each, strict=True)
    ]


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(*leaves)
        for one, other in zip(first, second, strict=True)
        for leaves in zip(one, other, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [pictures, Numbers, Uneven])
def test_batches_are_equal_on_any_number_of_ranks_and_workers_and_from_any_step_on(dataset):
    more = {"length_window": 2} if dataset is Uneven else {}
    found = steps(split_of(dataset()), **more)
    for ranks, workers in ((2, 0), (3, 2)):
        assert equal(found, steps(split_of(dataset(), workers), ranks, **more)), (ranks, workers)
    assert equal(found[3:], steps(split_of(dataset(), 2), 2, first_step=3, **more))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_pass_and_sample_has_its_own_numbers_and_each_seed(workers):
    split = split_of(Numbers(), workers)
    samples = torch.cat([rows for epoch in range(3) for rows, _ in steps(split, epoch=epoch)])
    other = [batch.tree[0] for batch in TrainBatches(split, 4, SEED + 1, 0, 1).epoch(0)]
    samples = torch.cat([samples, *other])
    assert len(samples) == 3 * 2 * SIZE + SIZE
    assert [len(column.unique()) for column in samples.T] == [len(samples)] * 5


class Bits(Numbers):
    def __getitem__(self, index):
        return torch.randint(2**32, (), dtype=torch.int64), np.random.randint(0, 2**32), random.getrandbits(32)


def test_no_two_generators_draw_the_same_bits():
    """Of the same seed they would: those of torch and NumPy have the same algorithm."""
    (tree,) = split_of(Bits()).fetch([torch.arange(SIZE)])
    assert len(torch.cat(tree).unique()) == 3 * SIZE


def test_an_evaluation_finds_the_same_numbers_each_time_whatever_the_order_and_the_batches():
    split = split_of(Numbers())
    (expected,) = split.fetch([torch.arange(SIZE)])
    for mixed, size, workers in ((True, 3, 0), (False, 4, 2), (True, 11, 2)):
        rows = {
            int(index): row
            for batch in EvaluationBatches(split_of(Numbers(), workers), size, 0, 1, mixed)
            for row, index in zip(*batch.tree, strict=True)
        }
        assert all(torch.equal(rows[index], expected[0][index]) for index in range(SIZE))
    _, held = hold_out(split, 0.3)
    (tree,) = held.fetch([torch.arange(3)])
    assert torch.equal(tree[0], expected[0][tree[1]])


class Broken(Numbers):
    def __getitem__(self, index):
        super().__getitem__(index)
        raise OSError


@pytest.mark.parametrize("dataset", [Numbers(), Broken()])
def test_what_comes_after_draws_as_if_nothing_had_been_read(dataset):
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    torch.randn(3), np.random.normal(), random.gauss(0, 1)  # these keep a number for the next call
    expected = torch.get_rng_state(), host_state(), kept_by_numpy()
    batches = TrainBatches(split_of(dataset), 4, SEED, 0, 1).epoch(0)
    if isinstance(dataset, Broken):
        with pytest.raises(DataError, match="OSError"):
            next(batches)
    else:
        next(batches)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert (host_state(), kept_by_numpy()) == expected[1:]


def kept_by_numpy():
    """A normal number for the next call, and whether there is one."""
    return tuple(np.random.get_state(legacy=True))[3:]


class Augmenting(ImageClassifier):
    """Its images are changed as they are read, in training and, always alike, in evaluation."""

    def data(self, split):
        return Pictures(*super().data(split))


RECIPE = {"recipe": f"{__name__}:Augmenting", "train_fraction": 64 / 318, "log_interval": 1, "epochs": 2}


@pytest.mark.slow
def test_a_training_has_equal_bytes_on_any_number_of_ranks_and_workers_and_after_a_cut(train):
    exact = {"virtual_ranks": 6, **RECIPE}
    one = train(1, name="1", **exact)
    with pytest.raises(Unplugged):
        train(3, name="cut", loader_workers=2, checkpoint_seconds=0, on_event=unplug_at(3), **exact)
    resumed = train(2, name="cut", checkpoint_seconds=0, **exact)
    assert isinstance(resumed.events[0], RunStarted)
    assert resumed.events[0].first_step > 0
    assert identical(one, resumed)


def test_albumentations_transforms_are_seeded_as_the_message_says():
    albumentations = pytest.importorskip("albumentations")

    class Flipped(Numbers):
        def __init__(self):
            self.transform = albumentations.Compose(
                [
                    albumentations.HorizontalFlip(),
                    albumentations.RandomBrightnessContrast(),
                    albumentations.GaussNoise(),
                ]
            )

        def __getitem__(self, index):
            image = np.full((8, 8, 3), 90, np.uint8)
            image[:, :4] = 9 * index
            return self.transform(image=image)["image"], index

    class Seeded(Flipped):
        def __getitem__(self, index):
            self.transform.set_random_seed(torch.randint(2**31, ()).item())
            return super().__getitem__(index)

    calls = [*find_held_generators(Flipped())]
    assert calls == ["self.transform.set_random_seed(torch.randint(2**31, ()).item())"]
    assert not equal(steps(split_of(Flipped())), steps(split_of(Flipped())))
    assert equal(steps(split_of(Seeded())), steps(split_of(Seeded(), 2), 3))


def test_the_remedy_for_each_kind_of_generator_works():
    for rng in (np.random.default_rng(), np.random.RandomState(), random.Random(), random.SystemRandom()):
        holder = SimpleNamespace(rng=rng)
        (call,) = find_held_generators(holder)
        drawn = []
        for _ in range(2):
            torch.manual_seed(7)
            exec(call, {"self": holder, "numpy": np, "random": random, "torch": torch})
            drawn.append(holder.rng.random())
        assert drawn[0] == drawn[1], call


class Several:
    """Several transforms, each with a generator of its own, as MONAI's Compose."""

    def __init__(self):
        self.transforms = [np.random.RandomState(number) for number in range(3)]

    def set_random_state(self, seed):
        for transform in self.transforms:
            transform.seed(seed)


def test_one_call_seeds_all_transforms_of_monai():
    class Moved(Numbers):
        def __init__(self):
            self.transform = Several()

    assert [*find_held_generators(Moved())] == ["self.transform.set_random_state(torch.randint(2**31, ()).item())"]
