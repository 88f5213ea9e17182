"""The trials of a sweep side by side, as a table and on a page."""

import csv

from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.page import comparison, ranked, write_table
from flyte_ddp.sweep.search import TrialResult


def result(accuracy, failure="", **hyperparameters):
    return TrialResult(Hyperparameters(dataset="digits", **hyperparameters), accuracy, 100, 1.25, "", failure)


RESULTS = [
    result(0.0, "<NaN>", learning_rate=10.0, schedule="constant"),
    result(0.9, learning_rate=0.1, schedule="constant"),
    result(0.96, learning_rate=0.01, schedule="onecycle"),
    result(0.96, learning_rate=0.02, schedule="onecycle"),
]
NAMES = ["learning_rate", "schedule"]


def test_the_table_has_the_best_first_and_those_without_an_accuracy_last(tmp_path):
    write_table(ranked(RESULTS), NAMES, tmp_path / "trials.csv")
    with open(tmp_path / "trials.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["trial", "learning_rate", "schedule", "validation_accuracy", "seconds", "report", "failure"],
            ["3", "0.01", "onecycle", "0.96", "1.2", "", ""],
            ["4", "0.02", "onecycle", "0.96", "1.2", "", ""],
            ["2", "0.1", "constant", "0.9", "1.2", "", ""],
            ["1", "10.0", "constant", "", "1.2", "", "<NaN>"],
        ]


def test_the_page_shows_every_trial_and_marks_the_best():
    shown = comparison(ranked(RESULTS), NAMES)
    assert "Best: learning_rate 0.01, schedule onecycle, with 96.00% validation accuracy" in shown
    assert "validation errors by learning_rate: 3 values, the lowest 4.00% at 0.01; 1 without" in shown
    assert "validation errors by schedule: 3 values, the lowest 4.00% at onecycle; 1 without" in shown
    assert "100 held-out training images" in shown
    assert "Trials within 4.3% of each other" in shown
    assert "Trial 1 (learning_rate 10, schedule constant): &lt;NaN&gt;" in shown


def test_one_faultless_trial_makes_a_page():
    shown = comparison(ranked([result(1.0)]), ["seed"])
    assert "validation errors by seed: 1 values, the lowest 0.50% at 1" in shown
    assert "Trials within 2.0% of each other" in shown
