"""A validation split chooses the best epoch; the test split is looked at once, at the end."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.batches.splits import Resident, Subset, hold_out
from flyte_ddp.engine.monitor.best_tracker import BestTracker
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import EpochChosen, EpochFinished, NotLearning, RunStarted, StepLogged
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train as train_recipe
from tests.commands import same
from tests.engine.dataset_recipes import SeededDataset
from tests.engine.probe_recipes import Settings
from tests.small_training import Unplugged, identical

# A rate at which the network learns in the first epoch and collapses later, so that the last epoch is not the best
WAVERING = {"validation_fraction": 0.2, "epochs": 6, "schedule": "constant", "learning_rate": 0.16, "clip_norm": 0.0}


def of(trained, kind):
    return [event for event in trained.events if isinstance(event, kind)]


# --- the choice ---


def chosen(values, **settings):
    choice = BestTracker("loss", is_lower_better=settings.pop("is_lower_better", True), **settings)
    model = nn.Linear(1, 1)
    for epoch, value in enumerate(values):
        nn.init.constant_(model.weight, epoch)
        choice.after_evaluation(epoch, {"loss": value}, model.state_dict())
        if choice.is_over:
            break
    if choice.weights is not None:
        model.load_state_dict(choice.weights)
    number = range(epoch + 1)[choice.best]
    assert model.weight.item() == number
    return number, epoch


def test_the_best_epoch_is_the_earliest_of_equals():
    assert chosen([3.0, 1.0, 2.0, 1.0]) == (1, 3)
    assert chosen([3.0, 1.0, 2.0, 4.0], is_lower_better=False) == (3, 3)


def test_patience_counts_epochs_since_the_last_improvement():
    assert chosen([3.0, 1.0, 2.0, 2.0, 0.5], patience=2) == (1, 3)
    assert chosen([3.0, 1.0, 2.0, 0.9, 2.0], patience=2) == (3, 4)


def test_what_is_better_by_less_than_the_minimum_delta_is_the_best_but_no_improvement():
    assert chosen([1.0, 0.95, 0.93, 0.91, 0.5], patience=2, minimum_delta=0.1) == (2, 2)
    assert chosen([1.0, 0.95, 0.89, 0.85, 0.5], patience=2, minimum_delta=0.1) == (4, 4)


def test_a_measure_that_is_no_number_is_never_the_best():
    assert chosen([math.nan, 1.0, math.nan]) == (1, 2)
    assert chosen([math.nan, math.nan]) == (1, 1)
    assert chosen([math.inf, 1.0, math.inf], is_lower_better=False) == (1, 2)
    assert chosen([-math.inf, 1.0, 2.0]) == (1, 2)
    assert chosen([math.nan, math.nan, 1.0], patience=2) == (1, 1)


@pytest.mark.parametrize(
    ("recipe", "split"),
    [
        ("OverflowingTest", "test"),
        ("OverflowingValidation", "validation"),
        ("OverflowingTestAfterValidation", "test"),
    ],
)
def test_an_evaluation_that_is_not_finite_ends_the_run_and_is_in_no_checkpoint(alone, tmp_path, recipe, split):
    """Of outputs that are NaN, the best guess is the first class: an accuracy says nothing."""
    events: list[Any] = []
    settings, options = Settings(epochs=2), RunOptions(nproc=0, tracking="off")
    with pytest.raises(NonFiniteError, match=rf"the loss on the {split} split is nan after epoch \d, although"):
        train_recipe(
            f"tests.engine.measure_recipes:{recipe}", settings, options, output=tmp_path, on_event=events.append
        )
    evaluated = [event.evaluated for event in events if isinstance(event, EpochFinished)]
    assert all(math.isfinite(value) for measures in evaluated for value in measures.values())
    assert not (tmp_path / "model.pt").exists()
    assert (tmp_path / "checkpoint").exists() == bool(evaluated)


def test_a_measure_that_is_never_finite_chooses_no_epoch_and_says_so(alone, tmp_path):
    events: list[Any] = []
    settings, options = Settings(epochs=2), RunOptions(nproc=0, tracking="off", keep_best=1)
    trained = train_recipe(
        "tests.engine.measure_recipes:BrokenScoreOfValidation",
        settings,
        options,
        output=tmp_path,
        on_event=events.append,
    )
    assert (trained.best_epoch, trained.kept) == (0, [])
    assert [event.is_best for event in events if isinstance(event, EpochChosen)] == [False]
    broken, unchosen = (one for one in trained.warnings if "guessing" not in one)
    assert broken.startswith(
        "score on the validation split is not finite after epoch 1, although the loss is: look for"
    )
    assert unchosen.startswith(
        "the weights are those of the last epoch, not of the best: score on the validation split"
    )
    (steps,) = (event.steps_per_epoch for event in events if isinstance(event, RunStarted))
    told = [(event.epoch, event.step) for event in events if isinstance(event, NotLearning)]
    assert told[-1] == (1, steps), "curves mark what is said of the last epoch at its end"


# --- the split ---


def test_no_sample_is_held_out_twice_or_lost_and_the_same_ones_each_time():
    split = Resident(torch.arange(100), torch.device("cpu"))
    kept, held = hold_out(split, 0.2)
    everything = [next(part.fetch([torch.arange(len(part))])) for part in (kept, held)]
    assert [len(part) for part in everything] == [80, 20]
    assert torch.cat(everything).sort()[0].tolist() == list(range(100))
    assert torch.equal(everything[1], next(hold_out(split, 0.2)[1].fetch([torch.arange(20)])))


def test_samples_that_are_read_while_training_are_held_out_too():
    split = Streamed(SeededDataset(Settings()).data("train"), torch.device("cpu"))
    kept, held = hold_out(split, 0.25)
    assert isinstance(held, Subset)
    (rows,) = held.fetch([torch.tensor([2, 0])])
    (expected,) = split.fetch([held.at(torch.tensor([2, 0]))])
    assert (len(kept), len(held)) == (9, 3)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(InputError, match="validation_fraction must leave a sample on either side of 100"):
        hold_out(Resident(torch.arange(100), torch.device("cpu")), fraction)


def test_patience_without_a_validation_split_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(InputError, match=r"Hyperparameters.patience must be 0 without a validation split, got 3: set"):
        Hyperparameters(patience=3)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Sound", Settings(patience=3), "Settings.patience must be 0 without a validation split, got 3"),
        (
            "Undirected",
            Settings(validation_fraction=0.5),
            r"Undirected.higher_is_better or lower_is_better must name spread, which chooses the best epoch: add it to",
        ),
        (
            "Validated",
            Settings(validation_fraction=0.5),
            "must be 0 where the recipe has a validation split of its own",
        ),
    ],
)
def test_a_recipes_validation_that_contradicts_its_settings_is_refused(tmp_path, name, settings, words):
    with pytest.raises(InputError, match=words):
        train_recipe(f"tests.engine.probe_recipes:{name}", settings, RunOptions(nproc=1), output=tmp_path)


# --- the training ---


def test_the_best_epoch_is_given_back_and_tested_once(train, tmp_path):
    trained = train(1, **WAVERING)
    started, (tested,) = of(trained, RunStarted)[0], of(trained, EpochChosen)
    assert (started.train_samples, started.validation_samples, started.test_samples) == (254, 64, 50)
    accuracies = [epoch.validation["accuracy"] for epoch in trained.result.epochs]
    assert tested.epoch == accuracies.index(max(accuracies)) == trained.result.chosen_epoch
    assert tested.epoch < 5, "else this test shows nothing: choose another rate"
    assert all(not epoch.test and epoch.split == "validation" for epoch in of(trained, EpochFinished))
    assert trained.result.tested == tested.measures
    last = torch.load(tmp_path / "training" / "last.pt", weights_only=True)
    assert not torch.equal(last["fc2.weight"], trained.weights["fc2.weight"])
    shorter = train(1, name="shorter", **{**WAVERING, "epochs": tested.epoch + 1})
    assert all(torch.equal(weight, shorter.weights[name]) for name, weight in trained.weights.items())


def test_training_stops_early_and_says_so(train):
    trained = train(1, **{**WAVERING, "epochs": 20, "patience": 2, "minimum_delta": 0.02})
    (tested,) = of(trained, EpochChosen)
    assert tested.stopped_early
    assert len(trained.result.epochs) == tested.epochs < 20
    again = train(1, **{**WAVERING, "epochs": 20, "patience": 2, "minimum_delta": 0.02})
    assert not of(again, StepLogged), "a finished training has nothing left to do"
    assert identical(trained, again)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [2, 6])
def test_a_run_that_was_cut_off_remembers_the_best_epoch_and_its_patience(train, whole, epoch):
    settings = {**WAVERING, "log_interval": 5, "ema_decay": 0.9 if epoch == 2 else 0.0, "patience": 3}

    def unplug(event):
        is_there = isinstance(event, StepLogged) and (event.epoch, event.step) == (epoch, 10)
        if is_there or isinstance(event, EpochChosen):  # the second: when the test split has been looked at
            raise Unplugged

    expected = whole(**settings)
    with pytest.raises(Unplugged):
        train(name="cut", checkpoint_seconds=0, on_event=unplug, **settings)
    resumed = train(name="cut", **settings)
    last = len(expected.result.epochs)
    assert of(resumed, RunStarted)[0].first_epoch in (min(epoch, last) - 1, min(epoch, last))
    assert identical(expected, resumed)
    assert resumed.result.chosen_epoch == expected.result.chosen_epoch
    assert resumed.result.tested == expected.result.tested
    assert same(*(torch.load(run.folder / "last.pt", weights_only=True) for run in (expected, resumed)))


def test_a_recipes_own_split_chooses_by_the_loss(tmp_path):
    events: list[Any] = []
    settings = Settings(epochs=3)
    result = train_recipe(
        "tests.engine.probe_recipes:Validated", settings, RunOptions(nproc=2), output=tmp_path, on_event=events.append
    )
    first = next(number for number, event in enumerate(events) if isinstance(event, RunStarted))
    assert [event.doing for event in events[:first]] == [
        "importing torch",
        "reading the recipe and its data",
        "trying the recipe on some samples",
        "looking for a checkpoint",
    ]
    assert events[first].validation_samples == 5
    losses = [epoch.validation["loss"] for epoch in result.epochs]
    assert result.best_epoch == losses.index(min(losses)) + 1


def test_without_a_validation_split_each_epoch_is_reported_on_the_test_split(train, tmp_path):
    trained = train(1, epochs=2)
    assert not of(trained, EpochChosen)
    assert [epoch.split for epoch in trained.result.epochs] == ["test", "test"]
    assert trained.result.tested == trained.result.epochs[-1].test
    assert trained.result.chosen_epoch is None
    assert not (tmp_path / "training" / "last.pt").exists()
