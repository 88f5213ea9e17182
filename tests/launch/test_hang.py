"""A hang names the ranks that the others wait for."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hangs import hang_in_time, named

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_rank_that_is_stopped_from_outside_is_named():
    """One that sleeps: test_launcher.py, by the stacks."""
    way, ranks = "stopped from outside", (1,)
    assert named(hang_in_time(way, ranks, random.Random(way))) == ranks


# Ranks of a stopped server are never reaped, as those that are stuck in a driver never end
LEFT_BEHIND = """if True:
    import os, signal, sys
    from multiprocessing import forkserver
    from flyte_ddp.launch import launcher
    from flyte_ddp.launch.environment import World

    launcher.END_SECONDS = 0.2
    def on_event(event):
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
        print(forkserver._forkserver._forkserver_pid)
        raise OSError("observer")
    try:
        launcher.launch("waiting:wait", World(2, 2, "gloo", "cpu"), None, 60, on_event, preload=(), root=sys.argv[1])
    except OSError:
        print("ended")
"""
WAITING = """
import threading
from flyte_ddp.events import CheckpointFailed

def wait(environment, link, argument):
    link.emit(CheckpointFailed("waits"))
    threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no forkserver elsewhere")
def test_a_rank_that_does_not_end_when_killed_is_left_behind(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, "-c", LEFT_BEHIND, str(tmp_path)]
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, timeout=120)
    server, said = (tmp_path / "out").read_text().split()
    subprocess.run(["kill", "-KILL", server], check=True)
    assert (done.returncode, said) == (0, "ended")
