"""Samples of different lengths: the padding, and so the result, is that of the global batch."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.lengths import Lengths, SimilarLengths
from flyte_ddp.engine.batches.order import shuffled
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.events import StepLogged
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.length_recipes import (
    LENGTHS,
    Counted,
    HeldOut,
    Ragged,
    Sorted,
    TooFew,
    TooShortInTheMiddle,
    Unsorted,
    Varied,
    WindowAlone,
    WithoutLengths,
    Wrong,
    WrongInTheMiddle,
)
from tests.engine.probe_recipes import Settings
from tests.engine.test_frozen_base import run


def trained(recipe, output, nproc, **settings):
    """Losses and padding of each step and of the test, and the weights."""
    events: list[object] = []
    options = RunOptions(nproc=nproc, loader_workers=0)
    chosen = Settings(batch_size=7, test_batch_size=11, epochs=2, log_interval=1, **settings)
    result = train(recipe, chosen, options, output=output, on_event=events.append)
    steps = [event.measures for event in events if isinstance(event, StepLogged)] + [result.tested]
    found = torch.load(result.model_path, weights_only=True)
    return [step["loss"] for step in steps], [step["padding"] for step in steps], found


@pytest.mark.parametrize(("recipe", "settings"), [(Varied, {}), (HeldOut, {"validation_fraction": 0.3})])
def test_the_result_is_the_same_on_any_number_of_ranks(tmp_path, recipe, settings):
    losses, padding, weights = trained(recipe, tmp_path / "1", 1, virtual_ranks=3, **settings)
    assert max(padding) > 0.05
    others, other_padding, other_weights = trained(recipe, tmp_path / "3", 3, virtual_ranks=3, **settings)
    assert (others, other_padding) == (losses, padding)
    assert all(torch.equal(other_weights[name], value) for name, value in weights.items())


@pytest.mark.parametrize(("recipe", "nproc"), [(Varied, 2), (Counted, 2), (Counted, 1)])
def test_tokens_are_counted_by_lengths_or_by_the_measure_of_that_name(tmp_path, recipe, nproc):
    events: list[object] = []
    settings = Settings(batch_size=7, test_batch_size=11, epochs=2, log_interval=3)
    options = RunOptions(nproc=nproc, loader_workers=0)
    train(recipe, settings, options, output=tmp_path, on_event=events.append)
    steps = [event for event in events if isinstance(event, StepLogged)]
    tokens, since = 0.0, 0
    for step in steps:
        assert step.tokens_per_second is not None
        samples, since = step.samples - since, step.samples % len(LENGTHS)
        tokens += step.tokens_per_second * samples / step.samples_per_second
    assert tokens == pytest.approx(settings.epochs * sum(LENGTHS))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_what_is_in_memory_is_cut_to_the_longest_of_a_batch_and_sorting_saves_padding(tmp_path):
    padding = []
    for recipe in (Unsorted, HeldOut, Sorted):
        _, events = run(recipe, tmp_path / recipe.__name__, batch_size=5, log_interval=1)
        padding.append([event.measures["padding"] for event in events if isinstance(event, StepLogged)])
    assert padding[0] == padding[1]
    assert sum(padding[2]) < 0.5 * sum(padding[0])


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        (
            WithoutLengths,
            DataError,
            r"Sentences: samples must have the same shape, got \(\d+,\) and .* lengths\(split\)",
        ),
        (WindowAlone, InputError, r"WindowAlone.length_window must be 0 without WindowAlone.lengths, got 3"),
        (
            TooFew,
            InputError,
            r"TooFew.lengths .*, split \"train\": lengths must be 30 whole numbers .* got shape \(29,\)",
        ),
        (
            Wrong,
            InputError,
            r"lengths must be those of the first dimension of a tensor's samples, but for samples 0 and",
        ),
        (Ragged, InputError, r"lengths must be 30 whole numbers of at least 1, one for each sample"),
        (WrongInTheMiddle, DataError, r"samples have a length of at most 7, but lengths says 8"),
        (TooShortInTheMiddle, DataError, r"samples have a length of at most 7, but lengths says 6"),
    ],
)
def test_lengths_that_are_not_those_of_the_samples_are_refused(tmp_path, recipe, error, words):
    with pytest.raises(error, match=words) as kept:
        run(recipe, tmp_path, batch_size=1)
    assert multiprocessing.active_children() == [], f"loader workers live as long as {kept.value!r}"


def test_what_comes_padded_is_cut_and_features_as_long_as_that_are_refused():
    each = [2, 4, 3]
    words = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8], [5, 6, 7, 0]])
    features = torch.arange(24.0).view(3, 4, 2)
    with pytest.raises(InputError, match="but tensor 1 of length 4 goes on there: pad it with 0"):
        Lengths(each, 3, lambda indices: (words[indices], features[indices]))
    features = features.unsqueeze(1)
    lengths = Lengths(each, 3, lambda indices: (words[indices], features[indices]))
    some = torch.tensor([0, 2])
    cut, whole = lengths.padded((words[some], features[some]), some, some)
    assert torch.equal(cut, words[some, :3])
    assert torch.equal(whole, features[some])


@pytest.mark.parametrize(
    ("samples", "batch_size", "window"), [(100, 7, 4), (28, 7, 4), (30, 4, 1), (5, 8, 3), (9, 1, 9)]
)
def test_a_window_is_a_permutation_with_batches_of_similar_lengths(samples, batch_size, window):
    each = torch.tensor([1 + 37 * number % 101 for number in range(samples)])
    plain_order = SimpleNamespace(at=lambda positions: shuffled(positions, samples, 1))
    order = SimilarLengths(plain_order, each, samples, batch_size, window, key=5)
    whole = order.at(torch.arange(samples))
    assert sorted(whole.tolist()) == list(range(samples))
    # A rank asks for its own positions alone, in whatever parts
    parts = [order.at(part) for part in torch.arange(samples).split(3)]
    assert torch.equal(torch.cat(parts), whole)
    spans = [each[batch].max() - each[batch].min() for batch in whole.split(batch_size)]
    plain = [
        each[batch].max() - each[batch].min() for batch in shuffled(torch.arange(samples), samples, 1).split(batch_size)
    ]
    assert sum(spans) <= sum(plain)
    if window > 1 and samples > 2 * batch_size > 2:
        assert whole.tolist() != sorted(whole.tolist(), key=lambda index: int(each[index]))  # batches are shuffled


def test_a_window_is_sorted_once_for_all_log_lines_that_count_its_tokens():
    split = Resident(torch.zeros(64, 9), torch.device("cpu"))
    split.lengths = Lengths([1 + number % 9 for number in range(64)], 64, lambda indices: torch.zeros(len(indices), 9))
    train = TrainBatches(split, 4, 1, 0, 1, length_window=8)
    with torch.profiler.profile() as profile:
        counts = [train.count_tokens(epoch, step, step + 2) for epoch in range(2) for step in range(0, 16, 2)]
    (sorts,) = (event.count for event in profile.key_averages() if event.key == "aten::argsort")
    assert sorts == 4
    assert sum(counts) == 2 * int(split.lengths.each.sum())
