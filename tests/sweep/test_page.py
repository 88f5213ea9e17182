"""The trials of a sweep side by side, as a table and on a page."""

import csv
from dataclasses import asdict
from typing import Any

from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.halving import Ranked, TrialResult, rank_trials
from flyte_ddp.sweep.page import render_comparison, write_table
from flyte_ddp.sweep.search import Sweep

SWEEP = Sweep({"learning_rate": [], "schedule": []})


def trial(number: int, measures: dict[str, float], failure: str = "", **hyperparameters: Any) -> Ranked:
    result = TrialResult(measures, 100, seconds=1.25, failure=failure)
    return Ranked(number, asdict(Hyperparameters(dataset="digits", **hyperparameters)), result)


RESULTS = [
    trial(1, {}, "<NaN>", learning_rate=10.0, schedule="constant"),
    trial(2, {"accuracy": 0.9}, learning_rate=0.1, schedule="constant"),
    trial(3, {"accuracy": 0.96}, learning_rate=0.01, schedule="onecycle"),
    trial(4, {"accuracy": 0.96}, learning_rate=0.02, schedule="onecycle"),
]


def test_the_table_has_the_best_first_and_those_without_an_accuracy_last(tmp_path):
    write_table(SWEEP, rank_trials(SWEEP, RESULTS), tmp_path / "trials.csv")
    with open(tmp_path / "trials.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["trial", "learning_rate", "schedule", "validation_accuracy", "seconds", "report", "failure"],
            ["3", "0.01", "onecycle", "0.96", "1.2", "", ""],
            ["4", "0.02", "onecycle", "0.96", "1.2", "", ""],
            ["2", "0.1", "constant", "0.9", "1.2", "", ""],
            ["1", "10.0", "constant", "", "1.2", "", "<NaN>"],
        ]


def test_the_page_shows_every_trial_and_marks_the_best():
    shown = render_comparison(SWEEP, rank_trials(SWEEP, RESULTS), "digits")
    assert "Best: learning_rate 0.01, schedule onecycle: validation accuracy 96.00%" in shown
    assert "validation errors by learning_rate: 3 values, the best 4.00% at 0.01; 1 without" in shown
    assert "validation errors by schedule: 3 values, the best 4.00% at onecycle; 1 without" in shown
    assert "100 validation samples" in shown
    assert ">learning_rate</th>" in shown
    assert ">Validation accuracy</th>" in shown
    assert "Trials within 4.3% of each other" in shown
    assert "Trial 1 (learning_rate 10, schedule constant): &lt;NaN&gt;" in shown


def test_one_faultless_trial_makes_a_page():
    shown = render_comparison(Sweep({"seed": [1]}), [trial(1, {"accuracy": 1.0})], "digits")
    assert "validation errors by seed: 1 values, the best 0.50% at 1" in shown
    assert "Trials within 2.0% of each other" in shown


def test_a_page_of_other_measures_speaks_of_no_errors():
    sweep = Sweep({"width": [8, 16]}, measure="loss", largest=False)
    trials = [
        Ranked(number, {"epochs": 1, "width": width}, TrialResult({"loss": loss, "r2": -1.0}, 20, "test"))
        for number, width, loss in ((1, 8, 2.5), (2, 16, 1.25))
    ]
    shown = render_comparison(sweep, rank_trials(sweep, trials), "patients")
    assert "Best: width 16: test loss 1.2500" in shown
    assert "loss by width: 2 values, the best 1.25 at 16" in shown
    assert "chance" not in shown
    assert "errors" not in shown


def test_a_trial_may_lack_a_measure_that_the_best_one_has(tmp_path):
    trials = [
        trial(1, {"accuracy": 0.5}, learning_rate=0.1, schedule="constant"),
        trial(2, {"accuracy": 0.9, "f1": 0.8}, learning_rate=0.2, schedule="constant"),
    ]
    write_table(SWEEP, rank_trials(SWEEP, trials), tmp_path / "trials.csv")
    assert [line.split(",")[3:5] for line in (tmp_path / "trials.csv").read_text().splitlines()] == [
        ["validation_accuracy", "validation_f1"], ["0.9", "0.8"], ["0.5", ""],
    ]  # fmt: skip
    assert ">nan</td>" in render_comparison(SWEEP, rank_trials(SWEEP, trials), "digits")
