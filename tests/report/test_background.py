"""Slow, broken and hanging observers, none of which may be felt."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.events import Observer
from flyte_ddp.report.background import Background, IncompleteError, one_line

ROOT = Path(__file__).resolve().parents[2]


class Listener(Observer):
    """Waits for `may_listen`, then keeps what it hears; a text among that is raised."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.may_listen, self.closed = threading.Event(), False

    def __call__(self, event: Any) -> None:
        self.may_listen.wait()
        if isinstance(event, str):
            raise ValueError(event)
        self.heard.append(event)

    def close(self) -> None:
        self.closed = True


def test_telling_does_not_wait_and_closing_does(capsys):
    listener = Listener()
    background = Background("listener", lambda: listener, close_seconds=60)
    for number in range(1000):
        background(number)
    assert listener.heard == [], "it has not been let go, and still all was told"
    listener.may_listen.set()
    background("raised")
    background(1000)
    background.close()
    assert (listener.heard, listener.closed) == (list(range(1001)), True)
    assert "ValueError: raised); lost: 1 events" in capsys.readouterr().err


def test_failures_are_said_once_and_cost_their_event_alone(capsys):
    listener = Listener()
    listener.may_listen.set()
    background = Background("listener", lambda: listener, close_seconds=60)
    for event in (1, "first", "second", 2):
        background(event)
    background.close()
    assert (listener.heard, listener.closed) == ([1, 2], True)
    assert capsys.readouterr().err == (
        "Warning: listener is incomplete (ValueError: first); lost: 2 events. Training was not affected.\n"
    )


def test_one_that_cannot_be_made_is_said_at_once_and_at_the_end(capsys):
    def make() -> Any:
        raise IncompleteError("no such thing here")

    background = Background("listener", make, close_seconds=60)
    background._done.wait()
    said = capsys.readouterr().err
    assert said == "Warning: listener cannot be started (no such thing here). Training goes on without it.\n"
    background(1)
    background(2)
    background.close()
    said = capsys.readouterr().err
    assert said == "Warning: listener is incomplete (no such thing here); lost: 2 events. Training was not affected.\n"


def test_one_that_exits_while_it_is_made_is_said(capsys):
    background = Background("listener", lambda: sys.exit("no such option"), close_seconds=60)
    background("last")
    background.close()
    said = capsys.readouterr().err
    assert "Warning: listener cannot be started (SystemExit: no such option). Training goes on without it." in said
    assert "listener is incomplete (SystemExit: no such option); lost: 1 events" in said


def test_full_queue_drops(capsys):
    listener = Listener()
    background = Background("listener", lambda: listener, close_seconds=60, capacity=10)
    for number in range(50):
        background(number)
    listener.may_listen.set()
    background.close()
    assert listener.heard[:10] == list(range(10))
    assert len(listener.heard) in (10, 11), "one may have been in its hands already"
    assert f"too slow); lost: {50 - len(listener.heard)} events" in capsys.readouterr().err


def test_closing_that_is_interrupted_goes_on_when_it_is_called_again():
    listener = Listener()

    class Interrupts(Observer):
        def __call__(self, event: Any) -> None:
            while not background._is_closing:
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            listener(event)

    background = Background("listener", Interrupts, close_seconds=60)
    background(1)
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # which flytekit makes of Ctrl-C, once it is imported
        background.close()
    threading.Thread(target=listener.may_listen.set).start()
    background.close()
    assert listener.heard == [1]


def test_hanging_one_is_abandoned(capsys):
    listener, abandoned = Listener(), threading.Event()
    background = Background("listener", lambda: listener, close_seconds=0.1, abandon=abandoned.set)
    background(1)
    background.close()
    assert abandoned.is_set()
    assert "not ready within 0.1 s" in capsys.readouterr().err
    listener.may_listen.set()


def test_hanging_one_does_not_keep_the_process():
    program = """if True:
        import threading
        from flyte_ddp.report.background import Background
        Background("listener", threading.Event().wait, close_seconds=0.1).close()
    """
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stderr.count("\n") == 1


def test_messages_hide_the_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "marked")
    assert one_line(ValueError("bad key marked\n  in line")) == "bad key (key) in line"
