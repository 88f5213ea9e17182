"""The parts of a script's rank that need no processes."""

import math

from flyte_ddp.script.rank import EventsFile, fill_in
from flyte_ddp.script.training import whole_until, without_secrets
from tests.script.test_mirror import Attempt


def test_a_file_of_events_that_is_begun_anew_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "events"
    path.write_text('{"step": 100, "loss": 1.5}\n' * 3)
    events = EventsFile(path)
    path.write_text('{"step": 1}\n')
    assert events.read_lines() == [b'{"step": 1}']
    with open(path, "a") as file:
        file.write('{"step": 2}\n{"step"')
    assert events.read_lines() == [b'{"step": 2}']
    assert events.read_lines(is_last=True) == [b'{"step"']


def test_names_in_arguments_are_whole_words():
    values = {"DDP_EVENTS": "/events"}
    given = "${DDP_EVENTS}:$DDP_EVENTS/x:$DDP_EVENTS_X:${HOME}:$"
    assert fill_in(given, values) == "/events:/events/x:$DDP_EVENTS_X:${HOME}:$"


def test_values_of_secrets_are_not_shown():
    given = ["--api_key", "X", "--hf-token=Y", "--max_tokens", "5", "--password", "--lr", "1"]
    assert without_secrets(given) == [
        "--api_key", "***", "--hf-token=***", "--max_tokens", "5", "--password", "--lr", "1",
    ]  # fmt: skip


def test_rank_0_alone_saves_within_the_grace(tmp_path):
    (tmp_path / "0").touch()
    assert whole_until(tmp_path, 2, is_stop=False) == 0
    assert whole_until(tmp_path, 2, is_stop=True) == (tmp_path / "0").stat().st_mtime_ns
    (tmp_path / "1").touch()
    assert whole_until(tmp_path, 2, is_stop=False) == math.inf


def test_figures_of_earlier_attempts_are_known(tmp_path):
    first = Attempt(tmp_path)
    first.mirror.figures["loss"] = 0.5
    first.write(ckpt="whole")
    first.upload()
    assert Attempt(tmp_path, 1).mirror.figures == {"loss": 0.5}
