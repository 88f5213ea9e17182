"""What is shown of a recipe that brings its own data, settings and measures, no image classifier of this library."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.events import EpochFinished, RunStarted, StepLogged
from flyte_ddp.fields import setting
from flyte_ddp.report.article import document
from flyte_ddp.report.console import Console, say_summary
from flyte_ddp.report.contents import epoch_table, tiles
from flyte_ddp.report.record import Record, RunFailed, RunFinished, RunInfo
from flyte_ddp.report.report import MOST_CURVES, fragment, progress_curves
from flyte_ddp.report.words import format_measure
from flyte_ddp.settings import RunOptions, TrainingSettings
from tests.report.conftest import HOSTILE, Recorded

ROOT = Path(__file__).resolve().parents[2]
STARTED = RunStarted(
    dataset="letters",
    samples="sentences",
    headline="perplexity",
    percent=("top5_share",),
    train_samples=1200,
    test_samples=300,
    samples_per_epoch=1200,
    world_size=2,
    backend="gloo",
    device="cpu",
    precision="float32",
    epochs=2,
    steps_per_epoch=10,
    first_epoch=0,
    first_step=0,
    startup_seconds=1.0,
    layers=[("", "LSTM", 1000)],
)


@dataclass(frozen=True)
class LanguageSettings(TrainingSettings):
    """A recipe's own."""

    width: int = setting(64, minimum=1)


def measured(loss: float, share: float = 0.5) -> Any:
    return {"loss": loss, "perplexity": math.exp(loss), "top5_share": share}


def epoch_of(number: int, train: Any, test: Any) -> EpochFinished:
    return EpochFinished(number, 1200, train, test, train_seconds=3.1, evaluate_seconds=0.4)


@pytest.fixture
def told(tmp_path: Path) -> Recorded:
    """Two epochs of a language model, the second one's share not a number; nothing is kept of its test samples."""
    (tmp_path / "logs").mkdir()
    steps = [
        StepLogged(epoch, step, 120 * step, measured(3.0 - epoch - step / 10), 0.1, 500.0, {"weight": 1.0})
        for epoch in (0, 1)
        for step in (5, 10)
    ]
    epochs = [epoch_of(0, measured(2.5), measured(2.25, 0.75)), epoch_of(1, measured(1.5), measured(1.25, math.nan))]
    result = TrainingResult(epochs, [], "perplexity", 1200, 300, "float32", 2**30, 0)
    place = RunInfo(
        name="20260101-000000-letters",
        tracking_id="0123abcd-4567cdef",
        attempt=0,
        recipe="own.package:LanguageModel",
        settings=LanguageSettings(width=32),
        options=RunOptions(),
        data=None,
        description=None,
        logs=tmp_path / "logs",
        checkpoint=str(tmp_path),
    )
    finished = RunFinished([result, dataclasses.replace(result, peak_bytes=2**31)], None, 9.0)
    return Recorded(place, [STARTED, *steps[:2], epochs[0], *steps[2:], epochs[1], finished])


def test_values_are_written_by_kind():
    shown = [
        format_measure("loss", 0.03125, ()),
        format_measure("share", 0.98987, ("share",)),
        format_measure("perplexity", 23.4567, ()),
    ]
    assert shown == ["0.0312", "98.99%", "23.46"]
    assert format_measure("loss", 0.03125, (), decimals=3) == "0.031"
    assert format_measure("share", 0.98987, ("share",), decimals=3) == "99.0%"


def test_console_says_the_headline_and_the_samples(told, capsys):
    console = Console()
    for event in told.events:
        console(event)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("letters: 1,200 training and 300 test sentences; 2 ranks (gloo, cpu, float32)")
    assert said[1] == "Train Epoch: 1 [600/1200 (50%)]\tLoss: 2.500000\tPerplexity: 12.18\tTop5 share: 50.00%"
    assert said[3] == "Epoch 1 of 2: test perplexity 9.488, test loss 2.2500, 3.1 s of training"


def test_a_headline_that_is_the_loss_is_said_once(told, capsys):
    console, record = Console(), Record(told.info)
    for event in (dataclasses.replace(STARTED, headline="loss"), told.of(EpochFinished)[0]):
        console(event)
        record(event)
    assert capsys.readouterr().err.splitlines()[1] == "Epoch 1 of 2: test loss 2.2500, 3.1 s of training"
    assert [label for _, label in tiles(record)][:2] == ["test loss", "training, 1 of 2 epochs"]
    assert record.measures == ["loss", "perplexity", "top5_share"]


def test_an_epoch_that_is_not_evaluated_has_no_measures_to_say(told, capsys):
    """As of a LightningModule without validation."""
    console, record, epoch = Console(), Record(told.info), epoch_of(0, measured(2.5), {})
    for event in (STARTED, epoch, RunFinished([TrainingResult([epoch], [], "", 0, 0, "float32", 0, 0)], None, 9.0)):
        console(event)
        record(event)
    assert capsys.readouterr().err.splitlines()[1] == "Epoch 1 of 2: 3.1 s of training"
    say_summary(record, Path("/runs/model.pt"), Path("/runs/report.html"), show_paths=False)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["", "Data", "Seconds"]


def test_last_words_are_of_the_headline(told, capsys):
    say_summary(told.record, Path("/runs/model.pt"), Path("/runs/report.html"), show_paths=False)
    assert capsys.readouterr().err.splitlines()[1:3] == [
        "Data:       letters, 1,200 training and 300 test sentences",
        "Perplexity: 9.488, 3.49 on the test sentences, epoch by epoch",
    ]


def test_page_shows_what_the_recipe_measures(told):
    text = document(told.record.title, fragment(told.record))
    for shown in (
        "Finished: training on letters",
        "LanguageModel, run 20260101-000000-letters",
        "test perplexity",
        "own.package:LanguageModel",
        "sentences per second",
        "Training sentences",
        "(default 64)",
    ):
        assert shown in text
    assert re.search(r"Peak memory of a rank</th><td>\s*2.00 GiB", text)
    assert "GPU memory" not in text
    assert not re.search("image|accuracy", text.rpartition("</style>")[2], re.IGNORECASE)
    assert text.count('role="img"') == 6  # loss, perplexity, share, learning rate, throughput, gradients
    assert "<h2>Pictures</h2>" not in text
    assert "<h2>Right and wrong</h2>" not in text


def test_table_and_curves_begin_with_the_headline(told):
    record = told.record
    assert epoch_table(record).heads == [
        "Epoch", "Test perplexity", "Test loss", "Test top5 share",
        "Training perplexity", "Training loss", "Training top5 share", "Seconds of training", "Weights",
    ]  # fmt: skip
    assert epoch_table(record).lines[1] == ["2", "3.49", "1.2500", "nan", "4.482", "1.5000", "50.00%", "3.1", "-"]
    curves = progress_curves(record)
    assert [(one.title, one.percent) for one in curves] == [
        ("Loss", False), ("Perplexity", False), ("Top5 share", True), ("Learning rate", False),
    ]  # fmt: skip
    assert curves[1].remark == "Test perplexity 3.49 after epoch 2."


def test_a_recipe_may_measure_much_and_other_things_when_it_trains(told):
    record = told.record
    many = {f"measure_{number}": float(number) for number in range(20)}
    record.epochs = [epoch_of(0, {"loss": 1.0}, {"loss": -1.0, **many})]
    assert len(epoch_table(record).heads) == len(epoch_table(record).lines[0]) == 11
    assert len(progress_curves(record)) == 2 + MOST_CURVES
    assert not progress_curves(record)[0].logarithmic, "a loss may be negative"
    assert "<h2>Progress</h2>" in fragment(record)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_make_a_page(told, value):
    record = Record(told.info)
    record(STARTED)
    measures = {"loss": value, "perplexity": value, "top5_share": value}
    for step in (5, 10):
        record(StepLogged(0, step, 120 * step, measures, 0.1, 500.0, {"weight": value}))
    record(epoch_of(0, measures, measures))
    assert fragment(record).count('role="img"') >= 5


def test_a_failure_before_the_start_has_a_page(told):
    record = Record(told.info)
    record(RunFailed("no module named own"))
    text = document(record.title, fragment(record))
    assert "Failed: training of LanguageModel" in text
    assert "<h2>Data</h2>" not in text


def test_page_shows_the_pictures_that_a_recipe_drew(told):
    colours, greys = np.full((3, 8, 6), 200, np.uint8), np.zeros((1, 5, 5), np.uint8)
    drawn: Any = {str(number): greys if number else colours for number in range(30)}
    captions = np.array([HOSTILE, *(f"picture {number}" for number in range(1, 30))])
    np.savez(told.info.logs / "pictures.npz", captions=captions, **drawn)
    text = fragment(told.record)
    assert "<h2>Pictures</h2>" in text
    assert text.count('<li><img src="data:image/png;base64,') == 24
    assert 'alt="picture 23">picture 23</li>' in text
    assert "picture 24" not in text
    assert "<script" not in text


def test_what_a_users_module_has_drawn_wrongly_takes_no_page_away(told):
    figures = told.info.logs / "figures"
    figures.mkdir()
    (figures / "Größe.svg").write_text("<svg>größe</svg>", encoding="latin-1")
    for wrong in ({"captions": ["a"]}, {"captions": ["a"], "0": np.zeros((1, 8, 8), np.float32)}):
        np.savez(told.info.logs / "pictures.npz", **wrong)
        assert "pictures.npz cannot be shown: " in fragment(told.record)
    (told.info.logs / "pictures.npz").write_bytes(b"PK")
    assert "pictures.npz cannot be shown: " in fragment(told.record)
