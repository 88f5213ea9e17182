"""What a run says: plain lines, a live line on a real pseudo-terminal, ranks that print, the last words."""

import dataclasses
import os
import pickle
import pty
import subprocess
import sys
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from flyte_ddp.events import EpochFinished, NotLearning, Printed, RanksTimed, RunStarted, SlowRank, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.report.console import (
    Console,
    LiveConsole,
    download_progress,
    is_shown,
    logger,
    next_step,
    say,
    say_summary,
    show_output,
    warn,
)
from flyte_ddp.settings import RunOptions

ROOT = Path(__file__).resolve().parents[2]


def test_plain_lines_in_the_tutorials_manner(recorded, capsys):
    console = Console("file:///runs/report.html")
    for event in recorded.events:
        console(event)
    console(NotLearning(0, 10, "no better than guessing"))
    console(SlowRank(0, 10, "the others wait", 1, "host", "data"))
    console(Printed(0, "from the first"))
    console(Printed(1, "from another"))
    console.close()
    said = capsys.readouterr().err.splitlines()
    measures = recorded.of(StepLogged)[0].measures
    assert "640 training and 96 test images; 2 ranks" in said[0]
    assert said.pop(1) == "Live report: file:///runs/report.html"
    measured = f"Loss: {measures['loss']:.6f}\tAccuracy: {measures['accuracy']:.2%}"
    assert said[1] == f"Train Epoch: 1 [320/640 (50%)]\t{measured}"
    epoch = recorded.of(EpochFinished)[0]
    assert said[3] == (
        f"Epoch 1 of 2: test accuracy {epoch.test['accuracy']:.2%}, test loss {epoch.test['loss']:.4f}, "
        f"{epoch.train_seconds:.1f} s of training, weights {epoch.digest}"
    )
    assert sum(line.startswith("Train Epoch") for line in said) == 4
    assert sum(line.startswith("Epoch ") for line in said) == 2
    warned = ["Warning: no better than guessing", "Warning: the others wait"]
    assert said[-7:-3] == [*warned, "[rank 0] from the first", "[rank 1] from another"]
    assert said[-3].startswith("Seconds of each rank: ")
    assert [line.split()[:2] for line in said[-2:]] == [["rank", "0"], ["rank", "1"]]


def test_several_hosts_are_counted(recorded, capsys):
    Console()(dataclasses.replace(recorded.events[0], world_size=4, hosts=["a", "b", "b", "a"]))
    assert "; 4 ranks on 2 hosts (gloo, " in capsys.readouterr().err


def test_a_training_on_one_host_without_a_slow_rank_has_nothing_to_say_of_them(recorded, capsys):
    console = Console()
    for event in recorded.events:
        console(event)
    assert recorded.of(RanksTimed)
    console.close()
    assert "Seconds of" not in capsys.readouterr().err


def test_a_program_with_a_handler_of_its_own_gets_what_would_be_printed(monkeypatch, capsys):
    heard = BufferingHandler(10)
    monkeypatch.setattr(logger, "handlers", [heard])
    show_output()
    say("trained")
    warn("100% full")
    said = [(message.levelname, message.getMessage()) for message in heard.buffer]
    assert said == [("INFO", "trained"), ("WARNING", "100% full")]
    assert capsys.readouterr().err == ""


def on_terminal(program: str, *arguments: str, columns: int = 100) -> str:
    """What a Python program writes to a terminal of its own."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, env=environment, stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    pieces: list[bytes] = []
    while True:
        try:
            piece = os.read(parent, 2**16)
        except OSError:  # how Linux says that nobody is at the other end any more
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(parent)
    assert process.wait(60) == 0, b"".join(pieces)
    return b"".join(pieces).decode()


@pytest.mark.slow
def test_terminal_has_one_live_line(recorded, tmp_path):
    program = """if True:
        import os, pickle, sys
        from pathlib import Path
        from flyte_ddp.report.console import LiveConsole, open_console, say, show_output
        show_output()
        for columns in ("40", "120"):
            os.environ["COLUMNS"] = columns
            console = open_console()
            assert isinstance(console, LiveConsole)
            console._progress.refresh()
            say("above the line")
            for event in pickle.loads(Path(sys.argv[1]).read_bytes()):
                console(event)
                console._progress.refresh()
            console.close()
            say("the end")
    """
    (tmp_path / "events.pickle").write_bytes(pickle.dumps(recorded.events))  # which takes no import of torch to read
    # whatever was drawn has been cleared again: what follows begins at the start of a line
    *parts, nothing = on_terminal(program, str(tmp_path / "events.pickle")).split("\x1b[2Kthe end\r\n")
    assert (len(parts), nothing) == (2, ""), parts
    epoch, last = recorded.of(EpochFinished)[-1], recorded.of(StepLogged)[-1].measures
    for said in parts:
        assert "Train Epoch" not in said
        assert f"Epoch 2 of 2: test accuracy {epoch.test['accuracy']:.2%}" in said
        assert said.count("Epoch 2 of 2") == 1
        assert "\x1b[2Kabove the line\r\n" in said, "not behind the live one, which would run over"
    figures = f"accuracy {last['accuracy']:.1%}, loss {last['loss']:.3f}, "
    assert [figures in said for said in parts] == [False, True], "each line is as wide as the terminal"
    assert "images/s" in parts[1]


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_training_goes_on_where_nobody_reads_what_it_says(recorded, monkeypatch, kind):
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    with monkeypatch.context() as patch, open(writer, "w", buffering=1) as stream:
        patch.setattr(sys, "stderr", stream)
        console = LiveConsole() if kind == "terminal" else Console()
        os.close(reader)
        for event in recorded.events:
            console(event)
        console.close()
        warn("the end")
        assert not is_shown()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
        say("there is room again")
        assert is_shown()


def test_downloads_show(capsys):
    with download_progress() as progress:
        for done in (0, 5_000_000, 9_900_000):
            progress("images.gz", done, 9_900_000)
    assert capsys.readouterr().err == "Downloading images.gz (9.9 MB)\n"
    program = """if True:
        from flyte_ddp.report.console import download_progress
        with download_progress() as progress:
            for done in (0, 5_000_000, 9_900_000):
                progress("images[test].gz", done, 9_900_000)
    """
    said = on_terminal(program)
    assert "images[test].gz" in said
    assert "9.9/9.9 MB" in said


def test_what_ranks_print_comes_with_their_rank():
    events: list[Any] = []
    launcher.launch("tests.report.printing:run", choose_world("gloo", 2, 2), None, 60, events.append)
    printed = [event for event in events if isinstance(event, Printed)]
    for rank in (0, 1):
        lines = [event.text for event in printed if event.rank == rank]
        assert lines[:2] == [f"printed by {rank}", "in two lines"]
        text = "".join(lines)  # a finalizer may print within a line
        assert (text.count("made"), text.count("finalized"), lines[-1]) == (200, 200, "the last one")
        assert any("UserWarning: mind this" in line for line in lines)


def test_last_words(recorded, capsys):
    record = recorded.record
    say_summary(record, Path("/runs/model.pt"), Path("/runs/report.html"), show_paths=True)
    said = capsys.readouterr().err
    for epoch in recorded.of(EpochFinished):
        assert f"{epoch.test['accuracy']:.2%}" in said
    assert "640 training and 96 test images" in said
    assert "Model:    /runs/model.pt" in said
    assert "Next:     python3 -m webbrowser file:///runs/report.html" in said
    assert "Seconds:  " in said
    assert f"Weights:  {recorded.events[-1].results[0].digest}" in said
    assert len(said.strip().splitlines()) == 7

    record.warnings = [NotLearning(0, 10, "it leapt"), SlowRank(0, 10, "rank 1 on host is slow", 1, "host", "data")]
    say_summary(record, Path("/runs/model.pt"), Path("/runs/report.html"), show_paths=False)
    said = capsys.readouterr().err
    assert "Warning:  it leapt" in said
    assert "is slow" not in said, "the seconds have it"

    many = dataclasses.replace(record, epochs=record.epochs * 50)
    say_summary(many, Path("/runs/model.pt"), Path("/runs/report.html"), show_paths=False)
    said = capsys.readouterr().err
    assert "…" in said
    assert "/runs" not in said
    info = dataclasses.replace(recorded.info, options=RunOptions(tracking="tensorboard"))
    assert next_step(info, Path("/runs/report.html")).startswith("tensorboard --logdir ")


def test_last_words_follow_the_outputs_that_pyflyte_prints(tmp_path):
    (tmp_path / "last_words.py").write_text(
        "from flytekit import task, workflow\n"
        "from flyte_ddp.report.console import say, say_last\n"
        "@task\n"
        "def count() -> int:\n"
        "    say_last('before something else')\n"
        "    say('something else')\n"
        "    say_last('at the end')\n"
        "    return 42\n"
        "@workflow\n"
        "def count_wf() -> int:\n"
        "    return count()\n"
    )
    done = CliRunner().invoke(pyflyte, ["run", str(tmp_path / "last_words.py"), "count_wf"])
    assert done.output.splitlines()[-4:] == ["before something else", "something else", "42", "at the end"]


def test_resumed_run_says_so(recorded, capsys):
    console = Console()
    console(dataclasses.replace(recorded.of(RunStarted)[0], first_epoch=1, first_step=3))
    assert "resuming from the checkpoint: epoch 2, step 4" in capsys.readouterr().err
