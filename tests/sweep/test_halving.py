"""Successive halving: which trials go on, and that those that do end where they would have without a stop."""

import csv
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.launch.failures import RankError, from_exit_code
from flyte_ddp.lightning.settings import LightningSettings
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.sweep.halving import (
    AllTrials,
    Entrant,
    TrialResult,
    check_reduction_factor,
    choose_entrants,
    describe_saving,
    latest_results,
    plan_rungs,
    rank_trials,
    run_rungs,
)
from flyte_ddp.sweep.search import Sweep, trials_of
from tests.commands import ROOT, pyflyte, same, start_pyflyte

RATES = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
BY_TWO = Sweep({"learning_rate": RATES}, reduction_factor=2)


def trials(sweep: Sweep, **base: Any) -> AllTrials:
    return [asdict(trial) for trial in trials_of(sweep, Hyperparameters(dataset="digits", **base))]


EIGHT = trials(BY_TWO, epochs=4)
NINE = trials(Sweep({"seed": list(range(9))}), epochs=9)


# --- which go on ---


def test_rungs_are_those_of_a_hyperband_bracket():
    assert plan_rungs(Sweep(reduction_factor=3), NINE) == [(9, 1), (3, 3), (1, 0)]
    assert plan_rungs(Sweep(reduction_factor=3), NINE[:8]) == [(8, 3), (2, 0)]
    assert plan_rungs(BY_TWO, EIGHT) == [(8, 1), (4, 2), (2, 0)]
    assert plan_rungs(Sweep(), EIGHT) == [(8, 0)]


@pytest.mark.parametrize("factor", [4, 5, 10])
def test_from_four_on_less_than_half_of_the_epochs_are_trained(factor):
    for epochs in range(factor, 60):
        for count in range(factor, 60):
            trained, before = 0, 0
            for entered, stop in plan_rungs(Sweep(reduction_factor=factor), [{"epochs": epochs}] * count):
                trained += entered * ((stop or epochs) - before)
                before = stop
            assert trained < epochs * count / 2


def after(stop: int, accuracies: dict[int, float]) -> list[TrialResult | None]:
    """Results of the trials with these numbers; those without an accuracy have failed."""
    return [
        TrialResult({"accuracy": accuracy}, 125, seconds=1.0, checkpoint=f"{number} at {stop}")
        if accuracy
        else TrialResult(seconds=1.0, failure="NonFiniteError")
        for number, accuracy in accuracies.items()
    ]


def entrant(number: int, stop_after: int, checkpoint: str) -> Entrant:
    return Entrant(json.dumps({**EIGHT[number - 1], "stop_after": stop_after}), checkpoint)


def test_the_better_ones_go_on_from_their_checkpoints():
    first = after(1, {1: 0.1, 2: 0.8, 3: 0.3, 4: 0.7, 5: 0.6, 6: 0.6, 7: 0.6, 8: 0})
    going = {number: entrant(number, 2, f"{number} at 1") for number in (2, 4, 5, 6)}
    assert choose_entrants(BY_TWO, EIGHT, [first]) == going, "of equals the earlier"

    second = after(2, {2: 0.81, 4: 0.9, 5: 0.82, 6: 0.7})
    assert choose_entrants(BY_TWO, EIGHT, [first, second]) == {4: entrant(4, 0, "4 at 2"), 5: entrant(5, 0, "5 at 2")}

    latest = latest_results(BY_TWO, EIGHT, [first, second, after(0, {4: 0.95, 5: 0.96})])
    assert [trial.epochs for trial in latest] == [1, 2, 1, 4, 4, 2, 1, 1]
    assert [trial.result.seconds for trial in latest] == [1, 2, 1, 3, 3, 2, 1, 1]
    assert describe_saving(BY_TWO, latest) == (
        "16 epochs instead of 32: all 8 trials trained to epoch 1, the best 4 to epoch 2, the best 2 to epoch 4"
    )


def test_under_lightning_all_trials_train_to_their_end():
    two = Sweep({"epochs": [2, 3]})
    under = [asdict(trial) for trial in trials_of(two, LightningSettings())]
    chosen = choose_entrants(two, under, []).values()
    assert [LightningSettings.from_json(one.settings).epochs for one in chosen] == [2, 3]
    assert [trial.epochs for trial in latest_results(two, under, [after(0, {1: 0.5, 2: 0.6})])] == [2, 3]
    check_reduction_factor(two, under)
    with pytest.raises(InputError, match="reduction_factor must be 1 under Lightning, where no training continues"):
        check_reduction_factor(replace(two, reduction_factor=2), under)


def test_one_that_was_cut_takes_the_place_of_one_that_failed():
    first = after(1, {1: 0.1, 2: 0.8, 3: 0.3, 4: 0.7, 5: 0.6, 6: 0.5, 7: 0.4, 8: 0})
    lost = [*after(2, {2: 0, 4: 0.7, 5: 0}), None]
    going = choose_entrants(BY_TWO, EIGHT, [first, lost])
    assert going == {4: entrant(4, 0, "4 at 2"), 7: entrant(7, 0, "7 at 1")}
    with pytest.raises(
        ReportedError, match=r"^Every trial of the sweep failed:\nTrial 1 \(learning_rate 0.05\): NonFin"
    ):
        choose_entrants(BY_TWO, EIGHT, [after(1, dict.fromkeys(range(1, 9), 0))])


@pytest.mark.parametrize(("largest", "winner"), [(True, 8), (False, 1)])
def test_any_measure_decides_and_one_that_is_no_number_loses(largest, winner):
    def run(entrant: Entrant) -> TrialResult:
        rate = json.loads(entrant.settings)["learning_rate"]
        return TrialResult({"loss": rate, "perplexity": math.nan if rate == 0.3 else math.exp(rate)})

    sweep = replace(BY_TWO, measure="perplexity", largest=largest)
    *_, last = run_rungs(sweep, EIGHT, run)
    assert len(last) == 2
    assert rank_trials(sweep, latest_results(sweep, EIGHT, run_rungs(sweep, EIGHT, run)))[0].number == winner
    with pytest.raises(InputError, match=r"Sweep\.measure must be one of loss, perplexity, got 'accuracy'"):
        run_rungs(BY_TWO, EIGHT, run)


def test_the_largest_of_a_measure_that_is_better_lower_is_refused():
    results = [TrialResult({"perplexity": 2.0 + number}, lower_is_better=["perplexity"]) for number in range(8)]
    with pytest.raises(InputError, match=r"^Sweep\.largest must be false for perplexity, got true: the recipe's"):
        choose_entrants(replace(BY_TWO, measure="perplexity"), EIGHT, [results])
    chosen = choose_entrants(replace(BY_TWO, measure="perplexity", largest=False), EIGHT, [results])
    assert list(chosen) == [1, 2, 3, 4]


def test_a_trial_whose_settings_its_recipe_refuses_ends_no_other():
    def run(entrant: Entrant) -> TrialResult:
        if (rate := json.loads(entrant.settings)["learning_rate"]) == 0.3:
            raise InputError("learning_rate must be another one, got 0.3")
        return TrialResult({"accuracy": rate})

    first, *_ = run_rungs(BY_TWO, EIGHT, run)
    assert [result.failure for result in first if result and result.failure] == [
        "InputError: learning_rate must be another one, got 0.3"
    ]


def test_a_trial_whose_rank_is_killed_ends_no_other_and_is_named_if_all_fail():
    def run(entrant: Entrant) -> TrialResult:
        raise RankError(from_exit_code(-signal.SIGKILL, 0, "host"))

    with pytest.raises(ReportedError, match=r"(?s)^Every trial .*\nTrial 8 \(learning_rate 0.7\): SIGKILL: "):
        run_rungs(BY_TWO, EIGHT, run)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("largest", [True, False])
def test_trials_whose_measure_is_not_finite_have_failed(value, largest):
    sweep = replace(BY_TWO, largest=largest, reduction_factor=1)
    results = [TrialResult({"accuracy": value if number else 0.5, "loss": 1.0}) for number in range(8)]
    latest = latest_results(sweep, EIGHT, [results])
    assert rank_trials(sweep, latest)[0].number == 1
    assert [bool(trial.result.failure) for trial in latest] == [False] + 7 * [True]
    assert f"accuracy after the last epoch is not finite ({value})" in latest[1].result.failure


def test_a_trial_without_the_measure_has_failed():
    """What a trial measures may depend on its settings."""
    results = [TrialResult({"loss": 1.0, **({"accuracy": 0.5} if number else {})}) for number in range(8)]
    sweep = replace(BY_TWO, reduction_factor=1)
    latest = latest_results(sweep, EIGHT, [results])
    assert rank_trials(sweep, latest)[0].number == 2
    assert [trial.result.failure for trial in latest] == ["it has no measure accuracy, but loss"] + 7 * [""]


@pytest.mark.parametrize(
    ("values", "base", "said"),
    [
        ({"learning_rate": [0.1, 0.2]}, {"epochs": 9}, "at most the numbers of epochs (9) and trials (2), got 3"),
        ({"learning_rate": RATES}, {"epochs": 2}, "at most the numbers of epochs (2) and trials (8), got 3"),
        ({"epochs": [3, 6, 9]}, {}, "must be 1 if trials differ in epochs or set stop_after, got 3: leave"),
        (
            {"learning_rate": RATES},
            {"epochs": 9, "stop_after": 3},
            "must be 1 if trials differ in epochs or set stop_after",
        ),
    ],
)
def test_where_nothing_can_be_cut_it_is_refused(values, base, said):
    sweep = Sweep(values, reduction_factor=3)
    with pytest.raises(InputError) as refused:
        check_reduction_factor(sweep, trials(sweep, **base))
    assert said in str(refused.value)
    check_reduction_factor(replace(sweep, reduction_factor=1), trials(sweep, **base))


def test_it_needs_neither_flytekit_nor_torch():
    program = (
        "import sys; from flyte_ddp.sweep import halving, page, search; "
        "print([name for name in ('flytekit', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


# --- locally ---


def sweep(values: str, factor: int = 1) -> list[str]:
    hp = '{"dataset": "digits", "epochs": 3, "batch_size": 256, "train_fraction": 0.34}'
    text = f'{{"values": {{"learning_rate": {values}}}, "reduction_factor": {factor}}}'
    return ["workflows/sweep.py", "sweep_wf", "--hp", hp, "--sweep", text, "--options", '{"nproc": 1}']


def table(said: str) -> list[dict[str, str]]:
    with open(re.findall(r"table=([^,]+)", said)[0], newline="") as file:
        return list(csv.DictReader(file))


def weights(row: dict[str, str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(Path(row["report"]).with_name("model.pt"), weights_only=True)
    return found


def epochs_of(log: str) -> list[str]:
    """Those that trials have trained."""
    return re.findall(r"^Epoch (\d of \d)", log.partition("\nBest: ")[0], re.MULTILINE)


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_and_its_winner_has_the_bits_of_an_uninterrupted_training():
    command = sweep("[0.02, 1e20, 0.1]", factor=3)
    running = start_pyflyte(*command)
    assert running.stderr is not None
    log, awaited = "", iter(["Continues from", "Train Epoch"])
    start = next(awaited)
    for line in running.stderr:
        log += line
        if line.startswith(start) and not (start := next(awaited, "")):
            break
    running.send_signal(signal.SIGINT)
    log += running.communicate(timeout=120)[1]
    assert running.returncode not in (0, None)
    assert "Every trial" not in log
    assert "\nEpoch " in log
    assert not re.search(r"warning|USDT|deprecat", log.partition("\nEpoch ")[0], re.IGNORECASE), "of what is imported"
    assert epochs_of(log)[:2] == ["1 of 1"] * 2, "and one that failed in its first"

    halved = pyflyte(*command)
    assert set(epochs_of(halved.stderr)) <= {"2 of 3", "3 of 3"}, "the first rung is remembered"
    held_out = "digits: 1,376 training, 125 validation and 296 test images"
    assert halved.stderr.count(held_out) == 1, "and so is the failure"
    assert "resuming from the checkpoint" in halved.stderr
    assert halved.stderr.count("digits: 1,501 training and 296 test images") == 1
    assert "validation_fraction=0.0" in halved.stdout, "the last one trains on all images"
    spared = "5 epochs instead of 9: all 3 trials trained to epoch 1, the best 1 to epoch 3"
    assert f"\nTrained:  {spared}\n" in halved.stderr
    winner, *others = table(halved.stdout)
    assert [row["trained_epochs"] for row in (winner, *others)] == ["3", "1", "1"]
    assert (winner["failure"], others[-1]["learning_rate"], others[-1]["validation_accuracy"]) == ("", "1e+20", "")
    assert "NonFiniteError" in others[-1]["failure"]
    assert f"learning_rate={winner['learning_rate']}" in halved.stdout
    assert "stop_after=0" in halved.stdout
    page = Path(re.findall(r" report=([^,]+)", halved.stdout)[0]).read_text()
    assert f"Trained: {spared}." in page
    assert "Trained epochs" in page
    assert "125 validation samples" in page
    assert "Trial 2 (learning_rate 1e+20): NonFiniteError" in page

    whole = pyflyte(*sweep(f"[{winner['learning_rate']}]"))
    assert epochs_of(whole.stderr) == ["1 of 3", "2 of 3", "3 of 3"]
    (uninterrupted,) = table(whole.stdout)
    assert "trained_epochs" not in uninterrupted
    assert uninterrupted["validation_accuracy"] == winner["validation_accuracy"]
    assert same(weights(winner), weights(uninterrupted))
