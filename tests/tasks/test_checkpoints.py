"""Local checkpoints are one training's at a time, and a lost one's are free at once."""

import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState

from flyte_ddp.tasks.checkpoints import checkpoint_store

ROOT = Path(__file__).parents[2]
HOLDER = """if True:
    import sys
    from tests.tasks.test_checkpoints import local_store
    with local_store() as store:
        store.path.write_text("half a training")
        print(store.path, flush=True)
        sys.stdin.read()
"""


@contextmanager
def local_store():
    """The store of the training "key", as a local task has it."""
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    local = context.with_execution_state(state)
    with FlyteContextManager.with_context(local), checkpoint_store("key", resume=True) as store:
        yield store


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A process that is at the training "key", and the place of its checkpoint."""
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_two_of_the_same_training_do_not_meet_and_the_second_leaves_nothing(holder):
    _, theirs = holder
    with local_store() as store:
        assert store.path.parent.parent == theirs.parent.parent
        assert store.path != theirs
        store.path.write_text("another")
        mine = store.path
    assert not mine.parent.exists()
    assert theirs.read_text() == "half a training"


def test_a_killed_one_is_taken_over(holder):
    process, theirs = holder
    process.kill()
    process.wait()
    with local_store() as store:
        assert store.path == theirs
        assert store.path.read_text() == "half a training"
    assert not any(theirs.parent.parent.iterdir()), "a training that succeeded leaves nothing, not even a lock"


def test_one_that_failed_keeps_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    with suppress(KeyError), local_store() as store:
        store.path.write_text("so far")
        raise KeyError
    with local_store() as again:
        assert again.path.read_text() == "so far"
