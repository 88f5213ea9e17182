"""Watching a training: from a file, while it grows, from an object storage, and on a terminal."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flyte_ddp.__main__ import main
from flyte_ddp.errors import ReportedError
from flyte_ddp.events import EpochFinished, Printed, RanksTimed, RunStarted, SlowRank
from flyte_ddp.report.console import Console
from flyte_ddp.report.progress import ProgressFile
from flyte_ddp.report.record import RunFailed
from flyte_ddp.watch.command import File, show
from tests.object_storage import object_storage
from tests.report.test_console import on_terminal

ROOT = Path(__file__).resolve().parents[2]
WATCH = [sys.executable, "-m", "flyte_ddp", "watch"]


def start(*arguments, **environment):
    return subprocess.Popen(
        [*WATCH, *map(str, arguments)], stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment}
    )


def watch(*arguments):
    done = CliRunner().invoke(main, ["watch", *map(str, arguments)])
    return done.exit_code, done.stderr


@pytest.fixture
def progress(recorded, tmp_path):
    return ProgressFile(tmp_path, "run")


def test_a_finished_training_looks_as_it_did_where_it_ran(recorded, progress, tmp_path, capsys):
    console = Console()
    for event in recorded.events:
        progress(event)
        console(event)
    there = capsys.readouterr().err
    (command,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "progress.md").read_text(), re.DOTALL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").symlink_to(tmp_path)
    for place in (tmp_path, tmp_path / "progress.jsonl", tmp_path / "run"):
        environment = {**os.environ, "LOGS": str(place)}
        done = subprocess.run(["sh", "-ec", command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0
        assert done.stderr.startswith(there)
        assert done.stderr.splitlines()[-1].startswith("The training has finished, after ")


def test_a_running_training_is_followed_to_its_failure(recorded, progress, tmp_path):
    progress(recorded.of(RunStarted)[0])
    with start(tmp_path) as process:
        assert process.stderr is not None
        assert "640 training and 96 test images" in process.stderr.readline()
        progress(recorded.of(EpochFinished)[0])
        assert process.stderr.readline().startswith("Epoch 1 of 2: test accuracy ")
        progress(RunFailed("rank 1 on host: Boom: it broke"))
        assert process.stderr.read().splitlines()[-1] == "Error: The training failed: rank 1 on host: Boom: it broke"
    assert process.returncode == 1


def test_a_file_of_another_run_is_not_read_on_as_if_it_were_the_first_ones(recorded, progress, tmp_path):
    progress(recorded.events[0])
    file = File(str(tmp_path / "progress.jsonl"))
    read = len(file.read_on(0))
    again = ProgressFile(tmp_path, "the same command")
    for event in recorded.events:
        again(event)
    with pytest.raises(ReportedError, match="has been restarted by another run: watch it again"):
        file.read_on(read)


def test_ranks_and_hosts_are_told_in_the_end_and_as_soon_as_one_leaves(recorded, progress, tmp_path):
    progress(recorded.events[0])
    progress(RanksTimed([0.1, 0.2], [1.0, 1.5], [0.5, 0.0], [0.0, 0.6]))
    _, said = watch(tmp_path, "--timeout", "0")
    assert [line.split()[:2] for line in said.splitlines()[2:4]] == [["rank", "0"], ["rank", "1"]]
    assert said.splitlines()[3].split()[-4:] == ["0.20", "1.50", "0.00", "0.60"]

    hosts, seconds = [f"node-{rank // 8}" for rank in range(512)], [1.0] * 512
    waited_for = [0.0] * 512
    waited_for[300] = 80.0
    progress(dataclasses.replace(recorded.events[0], world_size=512, hosts=hosts))
    progress(RanksTimed(seconds, seconds, seconds, waited_for))
    progress(SlowRank(0, 5, "rank 300 on node-37 is slow: it computes", 300, "node-37", "compute"))
    progress(RunFailed("enough"))
    lines = watch(tmp_path)[1].splitlines()
    assert "Warning: rank 300 on node-37 is slow: it computes" in lines
    at = lines.index(next(line for line in lines if line.startswith("Seconds of the 4 slowest of 512 ranks:")))
    assert any(re.fullmatch("rank 300 on node-37( +1.00){3} +80.00", line) for line in lines[at : at + 5])
    assert lines[at + 5].startswith("Seconds of the 16 slowest of 64 hosts:")
    assert any(re.fullmatch("host node-37, mean of 8( +1.00){3} +10.00", line) for line in lines[at + 5 :])
    assert len(lines) < at + 24, "a large world stays readable"


def test_an_object_storage_is_watched_as_well(recorded, progress, tmp_path):
    events = [event for event in recorded.events if type(event) is not RunStarted]
    progress(recorded.events[0])
    with object_storage() as storage:
        storage.objects["bucket/run/logs/progress.jsonl"] = (tmp_path / "progress.jsonl").read_bytes()
        with start("s3://bucket/run/logs", **storage.environment) as process:
            assert process.stderr is not None
            assert "640 training and 96 test images" in process.stderr.readline()
            for event in events:
                progress(event)
            storage.objects["bucket/run/logs/progress.jsonl"] = (tmp_path / "progress.jsonl").read_bytes()
            said = process.stderr.read().splitlines()
        assert sum(line.startswith("Epoch ") for line in said) == 2
        assert process.returncode == 0


def test_what_cannot_be_watched_is_one_error(recorded, progress, tmp_path):
    assert "nowhere/progress.jsonl cannot be read (FileNotFoundError)" in watch("nowhere")[1]
    for place in ("ftp://host/logs", "foo://bucket/logs"):
        status, said = watch(place)
        assert (status, f"{place} cannot be read (" in said) == (2, True), said
    progress(recorded.events[0])
    status, said = watch(tmp_path, "--timeout", "0")
    assert status == 1
    assert "has nothing new for 0 s: the training may have been killed" in said
    file = tmp_path / "progress.jsonl"
    for content, words in [
        (b"<html>\n", "is not the progress of a training"),
        (json.dumps({"event": "started", "format": 3}).encode() + b"\n", "has format 3, but this program knows 2"),
    ]:
        file.write_bytes(content)
        status, said = watch(file)
        assert status == 1
        assert words in said
        assert "Traceback" not in said


def damaged(lines):
    """Lines of a progress file, each with one thing wrong, and what came before it."""
    started, step = (json.loads(line) for line in lines[:2])
    yield from ([b"\xff\xfe"], [b"{" * 3], [b"[" * 100_000], [b"null"], [b'["started"]'], [b"{}"])
    yield from ([lines[1]], [json.dumps({**started, "format": "2"}).encode()], [b'{"event": "started", "format": 1}'])
    yield from ([b'{"event": "failed"}'], [b'{"event": "finished", "total_seconds": null}'])
    yield from ([b'{"event": "finished", "total_seconds": %s}' % number] for number in (b"NaN", b"1e999", b"-Infinity"))
    yield [lines[0], json.dumps({**step, "measures": None}).encode()]
    yield [lines[0], json.dumps({**step, "measures": {"loss": "low"}}).encode()]
    yield [lines[0], json.dumps({**step, "event": ["step"]}).encode()]
    three = dict.fromkeys(("data", "computing", "waiting", "waited_for"), [0.5] * 3)
    yield [lines[0], json.dumps({"event": "ranks", **three}).encode()]


def test_a_damaged_file_is_one_error_that_names_the_line(recorded, progress, tmp_path):
    for event in recorded.events:
        progress(event)
    path = tmp_path / "progress.jsonl"
    for lines in list(damaged(path.read_bytes().splitlines())):
        path.write_bytes(b"\n".join(lines) + b"\n")
        with pytest.raises(ReportedError, match="is not the progress of a training") as refused:
            show(File(str(path)), Console(), 0)
        assert repr(lines[-1][:100]) in refused.value.message


def test_what_is_watched_cannot_steer_the_terminal(progress, tmp_path, capsys):
    progress(Printed(0, "\x1b[2J\x9bcleared \udce4\ta tab"))
    progress(Printed(0, "\u202egnp.exe\u2066 \u2028"))
    progress(RunFailed("\x1b]0;title\x07"))
    failed = show(File(str(tmp_path / "progress.jsonl")), Console(), 0)
    said = capsys.readouterr().err.splitlines()
    assert said == ["[rank 0] \\x1b[2J\\x9bcleared \\udce4\ta tab", "[rank 0] \\u202egnp.exe\\u2066 \\u2028"]
    assert failed == RunFailed("\\x1b]0;title\\x07")


def test_a_terminal_has_the_live_line(recorded, progress, tmp_path):
    for event in recorded.events:
        progress(event)
    program = """if True:
        import sys
        from flyte_ddp.__main__ import main
        main(["watch", sys.argv[1]])
    """
    assert "Epoch 2 of 2: test accuracy" in on_terminal(program, str(tmp_path))


def test_help_names_the_command():
    assert "watch" in CliRunner().invoke(main, ["--help"]).stdout
