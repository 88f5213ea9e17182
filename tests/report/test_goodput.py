"""Each second of a training has one cause, over all attempts, kills and restarts."""

import json
import re
import time
from datetime import datetime

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import (
    CheckpointWritten,
    EpochFinished,
    Printed,
    RanksRestarted,
    RanksTimed,
    RunStarted,
    StartUp,
    StepLogged,
)
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.goodput import Attempt, Goodput, compute_goodput, format_seconds
from flyte_ddp.report.progress import ProgressFile, attempts_in
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.report.conftest import page_of
from tests.small_training import Unplugged


def started(epoch=0, step=0, epochs=2):
    values = {"first_epoch": epoch, "first_step": step, "epochs": epochs, "steps_per_epoch": 10, "hosts": ["a", "b"]}
    names = RunStarted.__dataclass_fields__
    return RunStarted(**{**{name: 0 for name in names if name not in values}, **values, "remarks": [], "layers": []})


def step(epoch, number):
    return StepLogged(epoch, number, 1, {"loss": 1.0}, 0.1, 1.0, {})


def finished(epoch, evaluate_seconds):
    return EpochFinished(epoch, 1, {}, {"loss": 1.0}, 1.0, evaluate_seconds)


FIRST = [
    (2.0, StartUp("importing torch")),
    (10.0, started()),
    (20.0, step(0, 5)),
    (21.0, CheckpointWritten(0, 5, "", stall_seconds=0.5, write_seconds=1.0)),
    (30.0, RanksTimed(data=[1.0, 1.0], computing=[9.0, 9.0], waiting=[0.0, 2.0], waited_for=[0.0, 2.0])),
    (40.0, step(0, 9)),
]
SECOND = [
    (51.0, StartUp("importing torch")),
    (60.0, started(0, 5)),
    (70.0, finished(0, 2.0)),
    (71.0, CheckpointWritten(1, 0, "", stall_seconds=1.0, write_seconds=0.5)),
    (75.0, Printed(0, "one line\u2028or two\x85or three")),
    (80.0, step(1, 3)),
    (85.0, RanksRestarted("killed", 1)),
    (90.0, started(1, 0)),
    (99.0, finished(1, 3.0)),
    (101.0, StartUp("nothing any more")),
]


def followed(goodput, events):
    for at, event in events:
        goodput.add(event, at)
    return goodput


def test_seconds_of_two_attempts_by_cause():
    first = followed(Goodput(0.0, fetched=1.0), FIRST)
    assert first.seconds == {
        "steps": 26.5, "data": 1.0, "stragglers": 2.0, "checkpoints": 0.5, "fetching": 1.0, "starting": 9.0
    }  # fmt: skip
    second = followed(Goodput(50.0, fetched=0.5, earlier=first.attempts), SECOND)
    assert second.seconds == {
        # 9.5 + 7.5 until each checkpoint that was gone on from, and 6 to the end; 3 of these were waited
        "steps": 20.0,
        "evaluating": 5.0,
        "data": 1.0,
        "stragglers": 2.0,
        "checkpoints": 1.5,
        "fetching": 1.5,
        "starting": 9.0,
        "recovering": 9.5 + 5.0,
        "lost": 20.0 + 14.5,
        "between": 10.0,
        "finishing": 2.0,
    }
    assert sum(second.seconds.values()) == SECOND[-1][0]
    assert compute_goodput(second.seconds) == 25 / 101
    assert format_seconds(second.seconds).endswith("between attempts 10.0, finishing 2.0 (goodput 25%)")
    assert len(first.attempts[0].marks) == 2, "what another goes on with stays as it is"


def test_work_without_a_checkpoint_is_lost_and_an_attempt_that_never_trained_loses_nothing():
    first = followed(Goodput(0.0), [(10.0, started()), (30.0, step(0, 5))])
    second = followed(Goodput(31.0, earlier=first.attempts), [(35.0, StartUp("importing torch"))])
    third = followed(Goodput(40.0, earlier=second.attempts), [(45.0, started()), (50.0, finished(1, 1.0))])
    expected = {"steps": 4, "evaluating": 1, "starting": 10, "recovering": 9, "lost": 20, "between": 6}
    assert third.seconds == expected


def test_a_checkpoint_that_was_made_known_too_late_loses_only_what_came_after_the_one_before():
    first = followed(Goodput(0.0), [*FIRST, (50.0, step(1, 1))])
    second = followed(Goodput(51.0, earlier=first.attempts), [(60.0, started(0, 9))])
    assert second.seconds["lost"] == first.attempts[0].work - 9.5


def test_an_attempt_that_starts_afresh_has_lost_all_attempts_before():
    first = followed(Goodput(0.0), FIRST)
    second = followed(Goodput(40.0, earlier=first.attempts), [(50.0, started(0, 5)), (60.0, step(0, 9))])
    third = followed(Goodput(60.0, earlier=second.attempts), [(70.0, started()), (80.0, step(0, 5))])
    assert third.seconds == {"steps": 10, "checkpoints": 0.5, "starting": 10, "recovering": 20, "lost": 39.5}


def test_attempts_that_overlap_count_each_second_once():
    first = followed(Goodput(0.0), FIRST)
    second = followed(Goodput(30.0, fetched=1.0, earlier=first.attempts), [(60.0, started())])
    assert sum(second.seconds.values()) == 60


def test_what_another_version_has_written_is_read():
    written = {
        "began": 1,
        "ended": 5,
        "seconds": {"steps": 4, "daydreaming": 1.0},
        "marks": [[0, 0, 0]],
        "mood": "good",
    }
    attempt = Attempt.read(written)
    assert (attempt.ended, attempt.work, attempt.marks) == (5.0, 4.0, [(0, 0, 0.0)])


def test_clocks_that_go_back_take_no_seconds():
    goodput = followed(Goodput(100.0), [(110.0, started()), (90.0, step(0, 1)), (115.0, finished(1, 99.0))])
    assert goodput.seconds == {"evaluating": 5.0, "starting": 10.0}
    assert Goodput(50.0, earlier=goodput.attempts).seconds["starting"] == 10.0


def test_a_progress_file_tells_the_same(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("flyte_ddp.report.progress.datetime", Clock(lambda: now))
    live = Goodput(0.0, fetched=1.0)
    for number, events in enumerate((FIRST, SECOND)):
        if number:
            now = 50.0
            live = Goodput(50.0, fetched=0.5, earlier=attempts_in(tmp_path / "0" / "progress.jsonl"))
        folder = tmp_path / str(number)
        folder.mkdir()
        file = ProgressFile(folder, "run", number, live)
        for now, event in events:
            live.add(event, now)
            file(event)
    assert attempts_in(folder / "progress.jsonl") == live.attempts
    assert sum(live.seconds.values()) == SECOND[-1][0]


class Clock:
    """datetime, at another time."""

    def __init__(self, now):
        self.now_in_seconds = now

    def now(self, zone):
        return datetime.fromtimestamp(self.now_in_seconds(), zone)

    fromisoformat = datetime.fromisoformat


@pytest.mark.parametrize("content", ["", "no JSON\n", '{"event": "attempt"}\n', '{"event": "started"}\n'])
def test_what_cannot_be_read_is_left_out(tmp_path, content):
    (tmp_path / "progress.jsonl").write_text(content)
    assert attempts_in(tmp_path / "progress.jsonl") == attempts_in(tmp_path / "nothing") == []


@pytest.mark.slow
def test_a_training_that_is_cut_off_twice_accounts_for_its_wall_clock(tmp_path, small_data):
    began = time.time()

    def call(cut_at):
        steps = 0

        def on_event(event):
            nonlocal steps
            steps += isinstance(event, StepLogged)
            if steps == cut_at:
                raise Unplugged

        hp = Hyperparameters(epochs=2, batch_size=16, log_interval=1, precision="float32")
        options = RunOptions(checkpoint_seconds=0, tracking="off")
        train(
            "flyte_ddp.recipes.images:ImageClassifier", hp, options, data=small_data, output=tmp_path, on_event=on_event
        )

    for cut_at in (15, 10):
        with pytest.raises(Unplugged):
            call(cut_at)
        time.sleep(0.5)
    call(-1)
    attempts = attempts_in(tmp_path / "progress.jsonl")
    last = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])
    assert len(attempts) == 3
    ended = datetime.fromisoformat(last["time"]).timestamp()
    # Or a busy machine's time between counting and writing, which a longer training's hundredth has room for
    assert sum(last["seconds"].values()) == pytest.approx(ended - attempts[0].began, rel=0.01, abs=0.5)
    assert began < attempts[0].began < ended < time.time()
    assert {"steps", "evaluating", "starting", "recovering", "lost", "between"} <= set(last["seconds"])
    assert last["seconds"]["between"] >= 1.0


def test_a_call_that_is_refused_leaves_what_is_known_of_earlier_attempts(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "progress.jsonl").write_text("an attempt\n")
    options = RunOptions(nproc=1, tracking="mlflow")
    with pytest.raises(InputError, match="tracking mlflow needs"):
        train("flyte_ddp.recipes.images:ImageClassifier", Hyperparameters(), options, output=tmp_path, report=True)
    assert (tmp_path / "progress.jsonl").read_text() == "an attempt\n"
    ProgressFile(tmp_path, "run", goodput=Goodput(0.0))
    (line,) = (tmp_path / "progress.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "attempt"


def test_a_page_has_a_bar_for_each_attempt_and_none_of_a_single_one(recorded):
    attempts = [Attempt(100.0 * number, 100.0 * number + 90) for number in range(11)]
    for number, attempt in enumerate(attempts):
        attempt.seconds["steps"], attempt.seconds["lost"] = 30.0 + number, 50.0
    record = recorded.record
    record.goodput = Goodput(2000.0, earlier=attempts)
    page = page_of(record)
    assert "Seconds of 12 attempts, goodput " in page
    assert page.count('class="stack"') == 8
    cell = r"<td class=\"number\">{}</td>\s*"
    assert re.search(r"Lost and done again</th>\s*" + 7 * cell.format("50.0") + cell.format("0.0"), page)
    assert ">910.0<" in page, "between attempts"
    record.goodput = Goodput(2000.0)
    assert 'class="stack"' not in page_of(record)
