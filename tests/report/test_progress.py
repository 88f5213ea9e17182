"""Progress as JSON lines: what other programs rely on, and what becomes events again."""

import dataclasses
import json
import math
import re
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flyte_ddp.code.user_code import find_code
from flyte_ddp.events import (
    CheckpointFailed,
    CheckpointRefused,
    CheckpointWritten,
    EpochChosen,
    NotLearning,
    Printed,
    RanksRestarted,
    SlowRank,
    StartUp,
    StepLogged,
)
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.observers import Observers
from flyte_ddp.report.progress import EVENTS, LEFT_OUT, ProgressFile, parse_event
from flyte_ddp.report.record import RunFailed
from flyte_ddp.settings import RunOptions

ROOT = Path(__file__).resolve().parents[2]
OTHERS = (
    StartUp("reading the data"),
    CheckpointWritten(0, 5, "/a/place", 0.1, 0.2),
    NotLearning(0, 10, "no better than guessing"),
    EpochChosen(0, 2, {"loss": 0.5}, stopped_early=True, seconds=0.25),
    CheckpointFailed("full"),
    CheckpointRefused("of another training"),
    SlowRank(0, 30, "rank 1 on host is slow", 1, "host", "data"),
    RanksRestarted("rank 1 on host: SIGKILL", 1),
    Printed(1, "line\nbreak \udce4"),
    RunFailed("rank 1 on host: Boom"),
)


@pytest.fixture
def written(recorded, tmp_path):
    """The lines of the recorded run, and one of each other kind."""
    progress = ProgressFile(tmp_path, "run", goodput=Goodput(0.0))
    for event in (*recorded.events, *OTHERS):
        progress(event)
    return [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]


def test_every_event_is_documented_with_all_its_fields(written):
    """A field that goes is a new format; one that comes has to be named in the page."""
    page = (ROOT / "docs" / "progress.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    documented = {name: {"event", "time", *re.findall(r"`(\w+)`", fields)} for name, fields in rows}
    assert {line["event"]: set(line) for line in written} == documented


def test_lines_become_the_events_again(recorded, written):
    events = [parse_event(line) for line in written if line["event"] in EVENTS]
    told = [event for event in (*recorded.events, *OTHERS) if type(event) in EVENTS.values()]
    for event, original in zip(events, told, strict=True):
        left_out = {name: value for name, value in LEFT_OUT.items() if hasattr(original, name)}
        again = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(original, **left_out))))
        assert json.loads(json.dumps(dataclasses.asdict(event))) == again


def test_what_is_not_finite_is_null(recorded, tmp_path):
    progress = ProgressFile(tmp_path, "run")
    started, step = recorded.events[0], recorded.of(StepLogged)[0]
    progress(started)
    progress(dataclasses.replace(step, measures={"loss": math.nan}))
    line = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])
    assert line["measures"] == {"loss": None}
    assert math.isnan(parse_event(line).measures["loss"])


def test_a_line_that_a_full_disk_has_cut_off_spoils_none_after_it(recorded, tmp_path):
    file = tmp_path / "progress.jsonl"
    progress, before = ProgressFile(tmp_path, "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    steps = recorded.of(StepLogged)
    progress(recorded.events[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 50, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            progress(steps[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    progress(steps[1])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, steps[1].step]


def test_a_long_run_has_some_thousand_lines_and_the_last_step_of_each_epoch(recorded, tmp_path):
    progress = ProgressFile(tmp_path, "run")
    progress(dataclasses.replace(recorded.events[0], steps_per_epoch=10_000))
    step = recorded.of(StepLogged)[0]
    for number in range(1, 10_001):
        progress(dataclasses.replace(step, step=number))
    steps = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()[1:]]
    assert 1000 < len(steps) < 5000
    assert steps[-1]["step"] == 10_000


def test_of_a_long_script_each_figure_is_written_to_its_end(recorded, tmp_path):
    progress = ProgressFile(tmp_path, "run")
    progress(dataclasses.replace(recorded.events[0], steps_per_epoch=None))
    step = recorded.of(StepLogged)[0]
    for number in range(1, 10_001):
        measures = {"val_loss": 2.0} if number % 10 == 0 else {"loss": 1.0}
        progress(dataclasses.replace(step, step=number, measures=measures))
    progress(recorded.events[-1])
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert len(steps) < 5000
    for name, last in {"loss": 9999, "val_loss": 10_000}.items():
        assert max(line["step"] for line in steps if name in line["measures"]) == last


def test_what_a_newer_program_says_beside_is_passed_over(written):
    assert parse_event({"event": "tea_break", "time": ""}) is None
    assert parse_event({**written[0], "weather": "fine"}) == parse_event(written[0])


def test_an_interrupt_while_the_end_waits_for_a_tracker_is_no_failure_of_what_has_been_trained(recorded, tmp_path):
    info = dataclasses.replace(recorded.info, logs=tmp_path, options=RunOptions(tracking="off"))
    page, goodput = tmp_path / "report.html", Goodput(time.time())
    with suppress(KeyboardInterrupt), Observers(info, goodput, page=page) as observers:
        for event in recorded.events[:-1]:
            observers(event)
        observers.end(recorded.events[-1])
        raise KeyboardInterrupt
    assert last_event(tmp_path) == "finished"
    assert "KeyboardInterrupt" not in page.read_text()


def test_a_page_that_cannot_be_written_is_no_failure_of_what_has_been_trained(recorded, tmp_path):
    info = dataclasses.replace(recorded.info, logs=tmp_path, options=RunOptions(tracking="off"))
    page = tmp_path / "file" / "report.html"  # where there is no room either, in whatever way
    page.parent.touch()
    with Observers(info, Goodput(time.time()), page=page) as observers:
        for event in recorded.events:
            observers(event) if event is not recorded.events[-1] else observers.end(event)
    assert last_event(tmp_path) == "finished"


def last_event(folder):
    return json.loads((folder / "progress.jsonl").read_text().splitlines()[-1])["event"]


def test_an_interrupt_while_the_end_waits_for_an_observer_is_no_failure_either(recorded, tmp_path):
    slow, info = [find_code("tests.report.listeners:Interrupts")], dataclasses.replace(recorded.info, logs=tmp_path)
    ended = KeyboardInterrupt, SystemExit  # which flytekit makes of Ctrl-C, once it is imported
    with suppress(*ended), Observers(info, Goodput(time.time()), own=slow) as observers:
        for event in recorded.events[:-1]:
            observers(event)
        observers.end(recorded.events[-1])
    assert last_event(tmp_path) == "finished"
