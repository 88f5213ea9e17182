"""The report, made from a real run: what it shows."""

import dataclasses
import math
import re
from contextlib import suppress
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flyte_ddp.events import (
    EpochFinished,
    NotLearning,
    Printed,
    RanksTimed,
    RunStarted,
    SlowRank,
    StepLogged,
    list_digests,
)  # fmt: skip
from flyte_ddp.report import predictions as report_predictions
from flyte_ddp.report.contents import setup_tables, tiles
from flyte_ddp.report.figures import Curves, draw, scatter, thin_out
from flyte_ddp.report.plot import make_axis
from flyte_ddp.report.predictions import load_predictions
from flyte_ddp.report.record import MOST_STEPS, Record, RunFailed, RunFinished
from flyte_ddp.report.report import PAGE_SECONDS, Report, fragment
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.settings import TrainingSettings
from tests.report.conftest import HOSTILE, HOSTILE_CLASS, page_of


class Addresses(HTMLParser):
    """All that a page refers to outside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "action") and not value.startswith(("data:", "#")):
                self.asked.append(value)


def test_page_is_small_and_asks_nobody(page):
    text = page.read_text()
    assert len(text.encode()) < 1_000_000
    found = Addresses()
    found.feed(text)
    assert found.asked == ["https://wandb.example/run?a=1&b=2"]  # a link, followed only by who clicks on it
    assert not re.search(r"url\((?!#)|@import", text)


def test_page_shows_what_happened(recorded, page):
    text = page.read_text()
    last = recorded.events[-1].results[0].epochs[-1]
    for shown in (
        f"{last.test['accuracy']:.2%}",
        f"{last.test['loss']:.4f}",
        "2 ranks",
        recorded.info.description.digest,
        surroundings()["torch"],
        "conv1.weight",
        "aten::convolution_backward",
        "Retries before this attempt",
        "log_interval",
    ):
        assert shown in text
    assert text.count('role="img"') == 5  # loss, accuracy, learning rate, throughput, gradients


def test_hostile_names_stay_text(page):
    text = page.read_text()
    assert HOSTILE not in text
    assert HOSTILE_CLASS not in text
    assert "<script" not in text
    assert "{{ 7 * 7 }}" in text


def test_counts_are_those_of_the_predictions(recorded):
    predictions = load_predictions(recorded.info, recorded.events[-1])
    assert predictions
    guesses = predictions.scores.argmax(1)
    matrix = np.zeros((10, 10), int)
    for truth, guess in zip(predictions.labels, guesses, strict=True):
        matrix[truth, guess] += 1
    assert (predictions.confusion() == matrix).all()
    right = (guesses == predictions.labels).sum()
    assert right / len(guesses) == recorded.events[-1].results[0].epochs[-1].test["accuracy"]
    assert sum(hits for hits, _ in predictions.class_accuracies()) == right
    mistakes = predictions.confident_mistakes(1000)
    assert len(mistakes) == len(guesses) - right
    sure = [predictions.probability(index) for index in mistakes]
    assert sure == sorted(sure, reverse=True)
    assert np.allclose(np.exp(predictions.scores).sum(1), 1, atol=1e-4)


def test_of_many_classes_the_worst_are_shown_that_have_images(recorded, monkeypatch):
    accuracies = [(0, 0), (9, 10), (5, 10), (0, 0), (7, 10), *[(10, 10)] * 5]
    monkeypatch.setattr(report_predictions, "MOST_BARS", 3)
    monkeypatch.setattr(report_predictions.Predictions, "class_accuracies", lambda self: accuracies)
    record: Any = SimpleNamespace(info=recorded.info, finished=recorded.events[-1])
    shown = report_predictions.describe_predictions(record)["classes"]
    assert [share for _, (_, share), _ in shown] == ["50.00%", "70.00%", "90.00%"]


def test_live_pages_follow_the_run(recorded, tmp_path):
    path, published, seen = tmp_path / "report.html", [], []  # type: ignore[var-annotated]
    record = Record(recorded.info)
    report = Report(record, path, published.append)
    for event in recorded.events:
        before = len(published)
        report._next_page = 0.0  # as if the pages before had cost nothing
        record(event)
        report(event)
        if event is recorded.events[-1]:
            report.close()
        if len(published) > before:
            seen.append((type(event), path.read_text()))
    assert [kind for kind, _ in seen] == [RunStarted, EpochFinished, RunFinished]
    assert ["Training, epoch 1 of 2" in seen[0][1], "Training, epoch 2 of 2" in seen[1][1]] == [True, True]
    assert ['http-equiv="refresh"' in text for _, text in seen] == [True, True, False]
    assert "Finished" in seen[-1][1]
    assert "<html" not in published[-1], "a Deck has a frame of its own"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_shown_is_not_made_for_each_step(recorded, tmp_path):
    tries: list[str] = []
    record = Record(recorded.info)

    def publish(body):
        tries.append(body)
        raise OSError("the storage is away")

    report = Report(record, tmp_path / "report.html", publish)
    report._last_page = -PAGE_SECONDS  # as if it were long ago, however short this machine has run
    for event in (recorded.events[0], *recorded.of(StepLogged), *recorded.of(StepLogged)):
        record(event)
        with suppress(OSError):
            report(event)
    assert len(tries) == 1


def test_a_live_page_shows_a_warning_at_once(recorded, tmp_path):
    record = Record(recorded.info)
    report = Report(record, tmp_path / "report.html", lambda body: None)
    begun = *recorded.of(RunStarted), *recorded.of(StepLogged)[:2]
    slow = SlowRank(0, 10, "rank 1 on <host> is slow", 1, "<host>", "data")
    for event in (*begun, NotLearning(0, 10, "the loss leapt"), slow):
        record(event)
        report(event)
    text = (tmp_path / "report.html").read_text()
    assert "<b>Warning:</b> the loss leapt" in text
    at = text.index("<b>Warning:</b> rank 1 on &lt;host&gt; is slow")
    assert at > text.index("<h2>Speed</h2>"), "it has no say in the accuracy"


def test_a_resumed_run_says_where_its_curves_begin(recorded):
    """But ranks that start again in the same process go on with those that there are."""
    record, (started,) = Record(recorded.info), recorded.of(RunStarted)
    record(dataclasses.replace(started, first_epoch=1, first_step=3))
    assert "Resumed from a checkpoint at epoch 2, step 4, where the curves of steps begin." in page_of(record)
    record = Record(recorded.info)
    for event in (started, recorded.of(StepLogged)[0], dataclasses.replace(started, first_epoch=1, first_step=3)):
        record(event)
    assert "Resumed from a checkpoint at epoch 2, step 4." in page_of(record)


def test_a_resumed_run_says_of_which_epochs_its_seconds_are(recorded):
    record, (started,), epochs = Record(recorded.info), recorded.of(RunStarted), recorded.of(EpochFinished)
    for event in (dataclasses.replace(started, first_epoch=1, earlier=list_digests(epochs[:1])), epochs[1]):
        record(event)
    seconds = f"{epochs[1].train_seconds:.1f} s"
    assert (seconds, "training since epoch 1, 2 of 2 epochs") in tiles(record)
    record(recorded.events[-1])
    assert "training, 2 of 2 epochs" in [label for _, label in tiles(record)]


def test_evaluations_that_are_told_again_are_shown_once(recorded):
    """As where ranks go on from a checkpoint that was written while another process evaluated."""
    record, (started,), (first, *_) = Record(recorded.info), recorded.of(RunStarted), recorded.of(EpochFinished)
    for event in (started, first, dataclasses.replace(started, first_epoch=1, first_step=3, earlier=[]), first):
        record(event)
    assert record.epochs == [first]
    record(dataclasses.replace(started, first_epoch=1, first_step=3, earlier=list_digests([first])))
    assert record.epochs == [first]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordSettings(TrainingSettings):
    vocabulary: int
    width: int = 8


def test_a_setting_is_shown_with_its_default_if_it_has_another_one(recorded):
    info = dataclasses.replace(recorded.info, settings=WordSettings(vocabulary=100, width=9))
    lines = setup_tables(Record(info))["Hyperparameters"]
    assert {("vocabulary", "100", ""), ("width", "9", "8"), ("seed", "1", "")} <= {*lines}


def test_a_failed_run_has_a_page(recorded):
    record = Record(recorded.info)
    for event in [*recorded.events[:4], Printed(1, "<b>warned</b>"), RunFailed("rank 1 on <host>: ValueError: bad")]:
        record(event)
    text = page_of(record)
    assert "rank 1 on &lt;host&gt;: ValueError: bad" in text
    assert "Rank 1 printed: &lt;b&gt;warned&lt;/b&gt;" in text


def test_what_ranks_print_neither_breaks_nor_fills_the_page(recorded):
    record = Record(recorded.info)
    for event in [*recorded.events[:4], Printed(1, "\udce4" * 10**6), RunFailed("\udce4" + "a" * 10**6)]:
        record(event)
    assert len(page_of(record).encode()) < 10**6


def test_a_measure_of_some_epochs_alone_is_shown_with_the_epoch_that_has_it(recorded):
    record = Record(recorded.info)
    first, last = recorded.of(EpochFinished)
    for event in (recorded.of(RunStarted)[0], dataclasses.replace(first, test={**first.test, "fid": 7.5}), last):
        record(event)
    shown = fragment(record)
    assert "Test fid 7.5 after epoch 1." in shown
    assert ">Test fid<" in shown


def test_a_training_that_does_not_learn_is_marked(recorded):
    record = recorded.record
    record.warnings = [NotLearning(0, 5, "the loss leapt")]
    shown = fragment(record)
    assert "<b>Warning:</b> the loss leapt" in shown
    assert shown.count("Warnings at 0.5.") == 2  # in what the loss and the accuracy curves say to those who can't see


def test_of_many_ranks_those_that_were_waited_for_most_are_shown(recorded):
    record = recorded.record
    assert len(rank_lines(fragment(record))) == 2
    waited_for = [0.5] * 512
    waited_for[300] = 1234.567
    record(dataclasses.replace(record.started, world_size=512, hosts=[f"node-{rank // 8}" for rank in range(512)]))
    record(RanksTimed([0.25] * 512, [2.0] * 512, [1.0] * 512, waited_for))
    shown = fragment(record)
    assert "Seconds of the 16 slowest of 512 ranks" in shown
    lines = rank_lines(shown)
    assert len(lines) == 16
    assert re.findall(r">([^<>]+)</t", lines[-1]) == ["300 on node-37", "0.25", "2.00", "1.00", "1,234.57"]


def rank_lines(shown: str) -> list[str]:
    (table,) = re.findall(r"<caption>Seconds of .*?ranks?</caption>.*?<tbody>(.*?)</tbody>", shown, re.DOTALL)
    return re.findall(r"<tr>.*?</tr>", table, re.DOTALL)


def test_a_long_run_is_thinned_out(recorded):
    record, step = Record(recorded.info), recorded.of(StepLogged)[0]
    for _ in range(5 * MOST_STEPS):
        record(step)
    assert MOST_STEPS // 2 <= len(record.steps) <= MOST_STEPS
    points = [(float(x), 0.0) for x in range(1001)]
    assert len(thin_out(points)) <= 300
    assert thin_out(points)[-1] == points[-1]


def test_of_a_long_script_each_figure_keeps_its_curve_and_the_newest_value_is_shown(recorded):
    record, step = Record(recorded.info), recorded.of(StepLogged)[0]
    record(dataclasses.replace(recorded.of(RunStarted)[0], epochs=None, steps_per_epoch=None))
    for number in range(1, 5 * MOST_STEPS):
        measures = {"val_loss": float(number)} if number % 2 else {"loss": float(number)}
        record(dataclasses.replace(step, step=number, measures=measures))
    assert len(record.steps) <= MOST_STEPS
    assert {name for one in record.steps for name in one.measures} == {"loss", "val_loss"}
    assert record.newest
    assert record.newest.measures == {"val_loss": 5.0 * MOST_STEPS - 1, "loss": 5.0 * MOST_STEPS - 2}
    assert [value for value, label in tiles(record) if label.endswith("newest")] == ["5119", "5118.0000"]


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1.0, float("nan"), 3.0], [5e-324, 1e308]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_odd_values_make_a_figure(values, logarithmic):
    points = [(float(x), y) for x, y in enumerate(values)]
    svg = draw(Curves("<Odd>", {"$a_b": points, "x&y": points}, logarithmic=logarithmic))
    assert svg.startswith('<svg role="img" aria-label="&lt;Odd&gt; over epochs')
    assert "$a_b" in svg


@pytest.mark.parametrize(("first", "label"), [(8.5, ">9<"), (8.95, ">8.96<")])
def test_a_figure_may_begin_at_any_step(first, label):
    """As that of a training that goes on within its last epochs: there need be no whole number on its axis."""
    assert label in draw(Curves("Learning rate", {"": [(first, 0.1), (9.0, 0.2), (first + 1.06 * (9.0 - first), 0.3)]}))


@pytest.mark.parametrize(
    ("values", "how", "labels"),
    [
        ([0.1, 0.98], {}, ["0.2", "0.4", "0.6", "0.8", "1"]),
        ([1, 4], {"integer": True}, ["1", "2", "3", "4"]),
        ([0, 12_000], {"from_zero": True}, ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000"]),
        ([1e-5, 3, -1], {"logarithmic": True}, ["1e-05", "0.0001", "0.001", "0.01", "0.1", "1"]),
        ([0.01, 0.05], {"logarithmic": True}, ["0.01", "0.02", "0.05"]),
        ([3.3, 3.4], {"logarithmic": True}, ["3.3", "3.32", "3.34", "3.36", "3.38", "3.4"]),
        ([-1, 0], {"logarithmic": True}, ["-1", "-0.8", "-0.6", "-0.4", "-0.2", "0"]),
        ([float("nan")], {}, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([7.0, 7.0], {"ticks": [7.0]}, ["7"]),
        ([math.log(6), math.nextafter(math.log(6), 2)], {}, ["1.7", "1.8", "1.9"]),
        ([1.0, math.nextafter(1, 2)], {"logarithmic": True}, ["0.5", "1", "2"]),
    ],
)
def test_an_axis_has_round_numbers(values, how, labels):
    axis = make_axis(values, 10.0, 110.0, **how)
    assert [*axis.labels.values()] == labels
    assert all(10 <= axis(value) <= 110 for value in axis.labels)


def test_a_curve_is_interrupted_where_it_is_not_finite():
    svg = draw(Curves("Loss", {"": [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0)]}))
    (curve,) = re.findall(r'<path d="([^"]+)" fill="none"', svg)
    assert re.sub(r"[\d. ]", "", curve) == "MLM"


def test_a_scatter_plot_marks_the_best_and_what_is_missing():
    svg = scatter("size", [1, 20, 3], "error", [0.5, None, 0.05], are_fractions=True)
    assert 'aria-label="error by size: 2 values, the best 50.00% at 1; 1 without"' in svg
    words = re.findall(r">([^<>]+)</text>", svg)
    assert words == ["error", "best", "failed", "5%", "10%", "20%", "50%", "1", "3", "20", "size"]
    words = re.findall(r">([^<>]+)</text>", scatter("model", ["cnn", "mlp", "cnn"], "r2", [0.9, 0.5, None]))
    assert {"cnn", "mlp"} < {*words}
