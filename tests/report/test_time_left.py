"""How long a training has to go, and what it does while it starts: terminal, page and progress.jsonl say the same."""

import dataclasses
import json
from typing import Any

import pytest

from flyte_ddp.events import EpochFinished, RunStarted, StartUp, StepLogged
from flyte_ddp.report.console import Console
from flyte_ddp.report.observers import TimeLeft
from flyte_ddp.report.progress import ProgressFile
from flyte_ddp.report.record import Record
from flyte_ddp.report.report import fragment
from flyte_ddp.report.words import time_left


@pytest.fixture
def said(recorded):
    """said(position, *timed): seconds_left of each step of a training that begins at this epoch and step.

    timed: the second, epoch and step of a log, or an evaluation's seconds after the epoch.
    """

    def said(position, *timed):
        now, left = 0.0, list[Any]()
        timer = TimeLeft(lambda: now)
        started, step, epoch = (recorded.of(kind)[0] for kind in (RunStarted, StepLogged, EpochFinished))
        first = {"first_epoch": position[0], "first_step": position[1]}
        timer.estimate(dataclasses.replace(started, epochs=4, steps_per_epoch=10, **first))
        for now, number, done in timed:  # noqa: B007 read by the timer
            if isinstance(done, float):
                timer.estimate(dataclasses.replace(epoch, epoch=number, evaluate_seconds=done))
            else:
                left.append(timer.estimate(dataclasses.replace(step, epoch=number, step=done)).seconds_left)
        return left

    return said


def test_nothing_is_said_in_the_first_seconds(said):
    assert said((0, 0), (4.0, 0, 1), (6.0, 0, 2)) == [None, 114.0]


def test_evaluations_count_by_those_that_there_have_been(said):
    assert said((0, 0), (10, 0, 10), (15, 0, 5.0), (16, 1, 1), (35, 2, 10)) == [30.0, 29 + 15.0, 10 + 15.0]


def test_only_the_steps_of_this_attempt_make_its_pace(said):
    assert said((2, 5), (10, 2, 10), (11, 2, 1.0), (31, 3, 10)) == [20.0, 2.0]


def test_an_epoch_that_is_longer_than_the_first_is_never_over_time(said):
    assert said((0, 0), (10, 3, 10), (30, 3, 30)) == [0.0, 0.0]


def test_an_attempt_that_begins_anew_forgets_what_was_before(recorded):
    timer = TimeLeft(iter([0, 100, 200, 202]).__next__)
    events = [timer.estimate(event) for event in (recorded.events[0], recorded.of(StepLogged)[0]) * 2]
    assert [events[1].seconds_left is None, events[3].seconds_left] == [False, None]


def test_words(recorded):
    run = recorded.events[0]
    assert [time_left(run, seconds) for seconds in (None, 0.4, 200.2)] == ["", "", "3 min 20 s left"]
    assert time_left(dataclasses.replace(run, may_end_early=True), 59.94) == "at most 59.9 s left"


def test_terminal_page_and_progress_say_the_same(recorded, tmp_path, capsys):
    record, progress = Record(recorded.info), ProgressFile(tmp_path, "run")
    step = dataclasses.replace(recorded.of(StepLogged)[0], seconds_left=4000.0)
    for observer in (record, progress, Console()):
        for event in (recorded.events[0], step):
            observer(event)
    assert capsys.readouterr().err.splitlines()[-1].endswith("%\t1 h 6 min left")
    assert "<b>1 h 6 min left</b>" in fragment(record)
    assert json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])["seconds_left"] == 4000


def test_what_start_up_is_doing_is_said(recorded, capsys):
    record, event = Record(recorded.info), StartUp("reading the data")
    for observer in (record, Console()):
        observer(event)
    assert capsys.readouterr().err == "Starting: reading the data\n"
    assert "Starting, reading the data</span>" in fragment(record)
