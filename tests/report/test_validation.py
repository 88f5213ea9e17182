"""What is shown of a training with a validation split: its curves, the chosen epoch, one look at the test split."""

import dataclasses
import re
from pathlib import Path

import pytest

from flyte_ddp.engine.job import KeptModel
from flyte_ddp.events import EpochChosen, EpochFinished, RunStarted
from flyte_ddp.report.article import document
from flyte_ddp.report.console import Console, say_summary
from flyte_ddp.report.contents import epoch_table, tiles
from flyte_ddp.report.progress import parse_event, select_fields
from flyte_ddp.report.record import Record, RunFinished
from flyte_ddp.report.report import fragment, progress_curves
from tests.report.conftest import Recorded
from tests.report.track import in_tensorboard, in_wandb, tell_tracker

ROOT = Path(__file__).resolve().parents[2]
TESTED = {"loss": 0.75, "accuracy": 0.625}


@pytest.fixture
def validated(recorded: Recorded, tmp_path: Path) -> Recorded:
    """The same real training, as if what it was tested on were validation images, and its first epoch the best."""
    (tmp_path / "logs").mkdir()
    events = []
    for event in recorded.events:
        if isinstance(event, RunStarted):
            event = dataclasses.replace(event, validation_samples=64)
        elif isinstance(event, EpochFinished):
            event = dataclasses.replace(event, test={}, validation=event.test)
        elif isinstance(event, RunFinished):
            epochs = [dataclasses.replace(one, test={}, validation=one.test) for one in event.results[0].epochs]
            results = [dataclasses.replace(one, epochs=epochs, chosen_epoch=0) for one in event.results]
            events.append(EpochChosen(0, 2, TESTED, stopped_early=True, seconds=0.5))
            event = dataclasses.replace(event, results=results)
        events.append(event)
    return Recorded(dataclasses.replace(recorded.info, logs=tmp_path / "logs"), events)


@pytest.fixture
def parted(validated: Recorded) -> Recorded:
    """The same, as if its evaluations had been after a quarter of each epoch."""
    events = []
    for event in validated.events:
        if isinstance(event, EpochFinished):
            event = dataclasses.replace(event, fraction=0.25)
        elif isinstance(event, EpochChosen):
            event = dataclasses.replace(event, epochs=1.25, fraction=0.25)
        elif isinstance(event, RunFinished):
            epochs = [dataclasses.replace(one, fraction=0.25) for one in event.results[0].epochs]
            event = dataclasses.replace(
                event, results=[dataclasses.replace(one, epochs=epochs) for one in event.results]
            )
        events.append(event)
    return Recorded(validated.info, events)


def test_the_console_names_the_splits(validated, capsys):
    console, record = Console(), validated.record
    for event in validated.events:
        console(event)
    say_summary(record, Path("model.pt"), Path("/report.html"), show_paths=False)
    said = capsys.readouterr().err
    first, second = (epoch.validation for epoch in record.epochs)
    assert "640 training, 64 validation and 96 test images; 2 ranks" in said
    assert f"Epoch 1 of 2: validation accuracy {first['accuracy']:.2%}, validation loss {first['loss']:.4f}, " in said
    chosen = "Best on the validation split: epoch 1, which gives test accuracy 62.50%, test loss 0.7500"
    assert f"Stopped early after epoch 2. {chosen}\n" in said
    accuracies = f"{first['accuracy']:.2%}, {second['accuracy']:.2%}"
    assert f"Accuracy: {accuracies} on the validation images, epoch by epoch" in said
    assert "Chosen:   epoch 1; 62.50% on the test images" in said


def test_the_report_has_the_validation_curves_and_the_chosen_epoch(validated):
    record = validated.record
    shown = {label: value for value, label in tiles(record)}
    assert shown["test accuracy (36 of 96 wrong)"] == "62.50%"
    assert shown["test loss"] == "0.7500"
    assert shown["is the best on the validation split; stopped early"] == "epoch 1"
    loss, accuracy = progress_curves(record)[:2]
    assert [x for x, _ in loss.series["validation"]] == [1.0, 2.0]
    assert "test" not in loss.series
    assert (loss.chosen, accuracy.chosen) == (1.0, 1.0)
    assert epoch_table(record).heads[1] == "Validation accuracy"
    assert epoch_table(record).lines[0][1] == f"{record.epochs[0].validation['accuracy']:.2%}"
    page = document(record.title, fragment(record))
    assert "Held out for validation" in page
    assert " The best: 1. Validation loss" in page
    assert ">chosen</text>" in page


def test_the_report_and_the_last_words_list_what_was_kept(validated, capsys):
    record = validated.record
    assert record.finished
    kept = [
        KeptModel("best-1-epoch-0.25.pt", 0.25, "accuracy", 0.875),
        KeptModel("best-2-epoch-2.pt", 2, "accuracy", 0.5),
    ]
    results = [dataclasses.replace(one, kept=kept) for one in record.finished.results]
    record.finished = dataclasses.replace(record.finished, results=results)
    page = re.sub(r"<[^>]+>|\s", " ", fragment(record))
    assert "File Epoch Validation accuracy" in " ".join(page.split())
    assert "best-1-epoch-0.25.pt 0.25 87.50% best-2-epoch-2.pt 2 50.00%" in " ".join(page.split())
    say_summary(record, Path("model.pt"), Path("/report.html"), show_paths=True)
    assert f"Kept:     {record.info.logs}/best-2-epoch-2.pt, accuracy 50.00% on the val" in capsys.readouterr().err


def test_before_the_end_the_report_shows_the_validation_split(validated):
    record = Record(validated.info)
    for event in validated.events:
        if not isinstance(event, (EpochChosen, RunFinished)):
            record(event)
    labels = [label for _, label in tiles(record)]
    assert labels[:2] == ["validation accuracy", "validation loss"]


def test_wandb_names_the_splits(validated, tmp_path):
    run = tell_tracker(validated, tmp_path, {"tracking": "offline"}).run
    points = in_wandb(run.history)
    assert [step for step, _ in points["validation/accuracy"]] == [10, 20]
    assert points["test/accuracy"] == [(20, 0.625)], "once, at the end"
    assert run.summary["best_epoch"] == 1
    assert run.summary["tested"]["accuracy"] == 0.625


def test_evaluations_within_an_epoch_are_shown_as_such(parted, tmp_path, capsys):
    console, record = Console(), parted.record
    for event in parted.events:
        console(event)
    say_summary(record, Path("model.pt"), Path("/report.html"), show_paths=False)
    said = capsys.readouterr().err
    assert "Epoch 1.25 of 2: validation accuracy" in said
    assert "Stopped early after epoch 1.25. Best on the validation split: epoch 0.25, which gives" in said
    assert "on the validation images, evaluation by evaluation" in said
    assert "Chosen:   epoch 0.25; 62.50% on the test images" in said
    shown = {label: value for value, label in tiles(record)}
    assert shown["is the best on the validation split; stopped early"] == "epoch 0.25"
    assert "training, 1.25 of 2 epochs" in shown
    assert [line[0] for line in epoch_table(record).lines] == ["0.25", "1.25"]
    loss = progress_curves(record)[0]
    assert [x for x, _ in loss.series["validation"]] == [0.25, 1.25]
    assert (loss.chosen, loss.remark[-17:]) == (0.25, "after epoch 1.25.")
    so_far = dataclasses.replace(record, finished=None)
    assert so_far.status == "Training, epoch 2 of 2"


def test_trackers_and_progress_have_evaluations_within_an_epoch_at_their_steps(parted, tmp_path):
    points = in_tensorboard(tell_tracker(parted, tmp_path, {"tracking": "tensorboard"}).logs)
    assert [step for step, _ in points["validation/loss"]] == [2, 12]  # of 10 per epoch
    assert [step for step, _ in points["test/loss"]] == [12], "when it was measured"
    logged = tell_tracker(parted, tmp_path, {"tracking": "offline"}).run
    assert logged.summary["best_epoch"] == 0.25
    (finished, *_) = [event for event in parted.events if isinstance(event, EpochFinished)]
    assert parse_event({"event": "epoch", "time": "", **select_fields(finished)}) == finished
    older = {name: value for name, value in select_fields(finished).items() if name != "fraction"}
    assert parse_event({"event": "epoch", "time": "", **older}).position == 1
