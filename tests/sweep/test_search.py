"""Which trials a sweep makes, and what it refuses."""

from dataclasses import dataclass

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.fields import setting
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.sweep.search import MOST_TRIALS, Sweep, trials_of

BASE = Hyperparameters(epochs=5, dataset="digits")


def test_a_grid_is_every_combination_of_valid_hyperparameters():
    values = {"learning_rate": [0.1, 1], "schedule": ["onecycle", "constant"], "nesterov": [False], "seed": [1, 1.0]}
    trials = trials_of(Sweep(values), BASE)
    assert [(trial.learning_rate, trial.schedule) for trial in trials] == [
        (0.1, "onecycle"), (0.1, "constant"), (1.0, "onecycle"), (1.0, "constant"),
    ]  # fmt: skip
    assert {(trial.epochs, trial.dataset, trial.nesterov, trial.seed) for trial in trials} == {(5, "digits", False, 1)}


def test_a_narrow_range_is_not_rounded_to_its_ends():
    values = {"sgd_momentum": {"minimum": 0.9999, "maximum": 0.99999}}
    assert len(trials_of(Sweep(values, search="random", trials=50), BASE)) > 45


def test_random_trials_stay_within_their_ranges_and_follow_the_seed():
    values = {
        "learning_rate": {"minimum": 0.01, "maximum": 1, "scale": "log"},
        "sgd_momentum": {"minimum": 0.5, "maximum": 0.99999},
        "shift_pixels": {"minimum": 0, "maximum": 2},
        "batch_size": [64, 128],
    }
    trials = trials_of(Sweep(values, search="random", trials=200, seed=3), BASE)
    assert len(trials) == 200
    assert {trial.batch_size for trial in trials} == {64, 128}
    rates = sorted(trial.learning_rate for trial in trials)
    assert 0.01 <= rates[0] < 0.013
    assert 0.07 < rates[100] < 0.14, "half of them below the geometric mean"
    assert 0.8 < rates[-1] <= 1
    assert 0.7 < sorted(trial.sgd_momentum for trial in trials)[100] < 0.8
    counts = [[trial.shift_pixels for trial in trials].count(pixels) for pixels in range(4)]
    assert min(counts[:3]) > 45, "each whole number has its share"
    assert counts[3] == 0
    assert trials == trials_of(Sweep(values, search="random", trials=200, seed=3), BASE)
    assert trials != trials_of(Sweep(values, search="random", trials=200, seed=4), BASE)


def test_what_is_drawn_twice_is_tried_once():
    trials = trials_of(Sweep({"shift_pixels": [0, 1, 1]}, search="random", trials=50), BASE)
    assert sorted(trial.shift_pixels for trial in trials) == [0, 1]


@dataclass(frozen=True)
class WithWeights(TrainingSettings):
    weights: dict = setting({})  # noqa: RUF009 copied


def test_a_setting_may_be_a_dict():
    """Whether it is what is tried, or just there."""
    grid = Sweep({"weights": [{"0": 1.0}, {"0": 2.0}, {"0": 1.0}]})
    assert [trial.weights for trial in trials_of(grid, WithWeights())] == [{"0": 1.0}, {"0": 2.0}]
    assert [trial.seed for trial in trials_of(Sweep({"seed": [1, 2, 1]}), WithWeights(weights={"1": 3.0}))] == [1, 2]


@pytest.mark.parametrize("search", ["grid", "random"])
def test_values_are_checked_beside_the_others_that_are_tried(search):
    """Not beside the base's, which no trial has."""
    values = {"virtual_ranks": [8, 16], "batch_size": [16, 32]}
    trials = trials_of(Sweep(values, search=search, trials=40), Hyperparameters(batch_size=4))
    assert {(trial.virtual_ranks, trial.batch_size) for trial in trials} == {(8, 16), (8, 32), (16, 16), (16, 32)}
    with pytest.raises(InputError, match=r"virtual_ranks must be at most batch_size \(16\), got 17"):
        trials_of(Sweep({**values, "virtual_ranks": [8, 17]}, search=search), Hyperparameters(batch_size=64))


RANGE = {"minimum": 0.1, "maximum": 1}


@pytest.mark.parametrize(
    ("search", "values", "words"),
    [
        ("grid", {}, "must name what to try"),
        ("grid", {"learning_rat": [0.1]}, "did you mean learning_rate?"),
        ("grid", {"learning_rate": 0.1}, "Sweep.values.learning_rate must be a list of values, got 0.1"),
        ("grid", {"learning_rate": []}, "must be a list of values, got []"),
        ("grid", {"learning_rate": RANGE}, "must be a list of values, got {"),
        ("grid", {"learning_rate": [0.1, -1]}, "Hyperparameters.learning_rate must be above 0, got -1"),
        ("grid", {"schedule": ["onecycle", "cosine"]}, "must be one of onecycle, constant"),
        ("grid", {"epochs": [1.5]}, "Hyperparameters.epochs must be a whole number, got 1.5"),
        ("grid", {"dataset": ["digits", "mnist"]}, "must not name dataset"),
        ("grid", {"validation_fraction": [0.1, 0.2]}, "must not name validation_fraction: trials compare only on"),
        ("grid", {"seed": list(range(15)), "batch_size": list(range(1, 15))}, f"at most {MOST_TRIALS} trials, got 210"),
        ("random", {"learning_rate": 0.1}, "or a range such as"),
        ("random", {"learning_rate": {"minimun": 0.1}}, "did you mean minimum?"),
        ("random", {"learning_rate": {"minimum": 0.1}}, "Range.maximum must be above minimum (0.1), got 0"),
        ("random", {"learning_rate": {"minimum": 0, "maximum": 1}}, "Hyperparameters.learning_rate must be above 0"),
        ("random", {"sgd_momentum": {"minimum": 0, "maximum": 0.9, "scale": "log"}}, "must be above 0 if"),
        ("random", {"shift_pixels": {"minimum": 0, "maximum": 9}}, "Hyperparameters.shift_pixels must be"),
        ("random", {"epochs": {"minimum": 1, "maximum": 2.5}}, "Hyperparameters.epochs must be a whole number"),
        ("random", {"schedule": RANGE}, "Hyperparameters.schedule must be a string, got 0.1"),
        ("random", {"nesterov": RANGE}, "Hyperparameters.nesterov must be true or false"),
    ],
)
def test_what_cannot_be_tried_is_refused(search, values, words):
    with pytest.raises(InputError) as raised:
        trials_of(Sweep(values, search=search), BASE)
    assert words in str(raised.value)


def test_the_worst_trial_by_its_loss_is_not_the_best():
    with pytest.raises(InputError, match=r"Sweep\.largest must be false for the loss, got true"):
        trials_of(Sweep({"seed": [1, 2]}, measure="loss"), BASE)
    assert len(trials_of(Sweep({"seed": [1, 2]}, measure="loss", largest=False), BASE)) == 2


@pytest.mark.parametrize("values", [[], "learning_rate", None])
def test_values_have_to_be_an_object(values):
    with pytest.raises(InputError, match=r"Sweep\.values must be an object, got"):
        Sweep.from_dict({"values": values})
