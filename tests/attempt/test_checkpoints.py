"""Local checkpoints are one training's at a time, and a lost one's are free at once; those in storage are not lost."""

import math
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, get_context

import pytest
from flytekit import FlyteContextManager, current_context
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import ExecutionState

from flyte_ddp.attempt import storage_folder
from flyte_ddp.attempt.checkpoints import ABANDONED_SECONDS, checkpoint_store
from flyte_ddp.attempt.pod import GPUS_VARIABLE
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import CheckpointWritten
from flyte_ddp.flyte1 import platform
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.launch.signals import finishing
from flyte_ddp.lock import LOCK
from flyte_ddp.manifest import models_beside
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.whole_files import LEFTOVER_SECONDS, write_whole
from tests.attempt.folders import FolderError, Folders
from tests.attempt.test_platform_training import FolderTraining
from tests.launch.targets import started
from tests.unreliable_storage import UnreliableStorage


@contextmanager
def local_store(resume_from=""):
    """The store of the training "key", as a local task has it."""
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    local = context.with_execution_state(state)
    with FlyteContextManager.with_context(local), checkpoint_store(platform, "key", True, resume_from) as store:
        yield store


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A process that is at the training "key", and the place of its checkpoint."""
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    mine, theirs = Pipe()
    process = get_context("fork").Process(target=hold, args=(theirs,))
    process.start()
    yield process, mine.recv()
    process.kill()
    process.join()


def hold(connection):
    with local_store() as store:
        store.path.write_text("half a training")
        connection.send(store.path)
        signal.pause()


def test_two_of_the_same_training_do_not_meet_and_the_second_leaves_nothing(holder):
    _, theirs = holder
    with local_store() as store:
        assert store.path.parent.parent == theirs.parent.parent
        assert store.path != theirs
        store.path.write_text("another")
        mine = store.path
    assert not mine.parent.exists()
    assert theirs.read_text() == "half a training"


def test_an_interrupted_one_says_where_the_same_command_goes_on_unless_its_checkpoint_is_removed(holder, capsys):
    process, theirs = holder
    said = []
    for _ in range(2):
        with suppress(KeyboardInterrupt), local_store() as store:
            store.path.write_text("another")
            raise KeyboardInterrupt
        said.append(capsys.readouterr().err)
        process.kill()
        process.join()
    assert said == ["", f"Interrupted; the same command resumes from {theirs}\n"]


def test_a_killed_one_is_taken_over(holder):
    process, theirs = holder
    process.kill()
    process.join()
    with local_store() as store:
        assert store.path == theirs
        assert store.path.read_text() == "half a training"
    assert not any(theirs.parent.parent.iterdir()), "a training that succeeded leaves nothing, not even a lock"


@pytest.mark.parametrize("idle", [0.0, 2 * ABANDONED_SECONDS])
def test_one_that_failed_keeps_its_checkpoint_however_old(tmp_path, monkeypatch, idle):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    with suppress(KeyError), local_store() as store:
        store.path.write_text("so far")
        raise KeyError
    then = time.time() - idle
    for path in (store.path, store.path.parent):
        os.utime(path, (then, then))
    with local_store() as again:
        assert again.path.read_text() == "so far"


def test_what_killed_processes_have_left_and_what_nobody_goes_on_from_is_removed(holder, tmp_path, capsys):
    _, theirs = holder
    checkpoints_of_all = theirs.parent.parent
    names = {"key-dead": 2 * LEFTOVER_SECONDS, "key-new": 0.0, "old": 2 * ABANDONED_SECONDS, "resumable": 86400.0}
    for name, idle in names.items():
        folder, then = checkpoints_of_all / name, time.time() - idle
        folder.mkdir()
        (folder / "checkpoint").write_text("half a training")
        for path in (folder / "checkpoint", folder):
            os.utime(path, (then, then))
    for path in (theirs, theirs.parent / LOCK, theirs.parent):
        os.utime(path, (0, 0))  # of a process that lives
    with local_store():
        left = {path.name for path in checkpoints_of_all.iterdir()}
    assert {"key", "key-new", "resumable"} <= left
    assert not {"key-dead", "old"} & left
    assert f"Removed {checkpoints_of_all}/old, the checkpoint of a training that has" in capsys.readouterr().err


def test_the_weights_beside_a_checkpoint_of_this_machine_come_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path / "runs"))
    for url in (f"{tmp_path}/theirs", f"{tmp_path}/theirs/", f"file://{tmp_path}/theirs"):
        beside = models_beside(tmp_path / "theirs" / "checkpoint")
        beside.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / "checkpoint").write_text("half a training")
        (beside / "key-1.pt").write_text("the best so far")
        with local_store(url) as store:
            assert store.path.read_text() == "half a training"
            assert (models_beside(store.path) / "key-1.pt").read_text() == "the best so far"


# --- in Flyte's storage ---


def on_a_cluster(checkpoint, folder):
    """A pod's context with this checkpoint and working folder."""
    context = FlyteContextManager.current_context()
    folder.mkdir(exist_ok=True)
    builder = current_context().builder()
    builder.checkpoint, builder.working_dir = checkpoint, folder
    state = context.new_execution_state().with_params(
        mode=ExecutionState.Mode.TASK_EXECUTION, user_space_params=builder.build()
    )
    return FlyteContextManager.with_context(context.with_execution_state(state))


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """attempt(number, failures): what an attempt restores, that many reads of the storage having failed."""

    def restored(number, failures=0):
        monkeypatch.setattr(UnreliableStorage, "failures", failures)
        mine, previous = (f"unreliable://bucket/{tmp_path.name}/{one}" for one in (number, number - 1))
        pod = on_a_cluster(SyncCheckpoint(mine, previous), tmp_path / str(number))
        with pod, checkpoint_store(platform, "key", resume=True) as store:
            return store.path.read_text() if store.path.exists() else None

    monkeypatch.setattr(storage_folder, "WAITS", (0.0,))
    storage = FlyteContextManager.current_context().file_access
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("half a training")
    storage.put_data(str(checkpoint), f"unreliable://bucket/{tmp_path.name}/1/checkpoint")
    return restored


def test_storage_that_fails_once_loses_nothing(attempt):
    assert attempt(2, failures=1) == attempt(3) == "half a training"


def test_an_attempt_that_cannot_read_the_checkpoint_ends_and_the_next_one_can(attempt):
    for number in (2, 3):
        with pytest.raises(RecoverableError, match=rf"/{number - 1} has a checkpoint: .*503 Slow Down"):
            attempt(number, failures=2)
    assert attempt(4) == "half a training"


def test_an_attempt_whose_pod_was_started_again_goes_on_from_its_own(attempt, tmp_path):
    assert attempt(2) == "half a training"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("more of it")
    FlyteContextManager.current_context().file_access.put_data(
        str(checkpoint), f"unreliable://bucket/{tmp_path.name}/2/checkpoint"
    )
    (tmp_path / "2" / "checkpoint").unlink()
    assert attempt(2) == "more of it"


def test_without_a_checkpoint_training_starts(attempt):
    assert attempt(7) is None


# --- on a platform of folders ---


class NoCheckpoints(Folders):
    """Takes no checkpoint: as when the pod is lost before its upload has ended."""

    def put(self, path, url):
        if url.endswith("/checkpoint"):
            raise OSError("503 Slow Down")
        super().put(path, url)


def restored(platform, resume=True):
    """The checkpoint that an attempt begins with; empty without one."""
    with checkpoint_store(platform, "key", resume) as store:
        return store.path.read_text() if store.path.exists() else ""


@pytest.fixture
def stored(tmp_path):
    """The root of a platform on which the first attempt has left a checkpoint."""
    (tmp_path / "0" / "checkpoints").mkdir(parents=True)
    (tmp_path / "0" / "checkpoints" / "checkpoint").write_text("half a training")
    return tmp_path


def test_attempts_that_are_lost_before_they_have_handed_it_on_lose_nothing(stored):
    for number in (1, 2):
        assert restored(NoCheckpoints(stored, number)) == "half a training"
    assert restored(Folders(stored, 3)) == "half a training"


def test_an_attempt_that_ends_before_it_has_its_data_loses_nothing(stored, monkeypatch):
    monkeypatch.setenv(GPUS_VARIABLE, "99")
    with pytest.raises(FolderError, match="this pod must have as many GPUs as were registered"):
        FolderTraining(Folders(stored, 1)).run(Hyperparameters(), RunOptions(), stored)
    assert restored(Folders(stored, 2)) == "half a training"


def test_a_storage_that_fails_once_has_the_checkpoint_that_the_user_names(tmp_path, monkeypatch):
    class Busy(Folders):
        failures = 1

        def get(self, url, path):
            if url.startswith(str(given)) and self.failures:
                self.failures -= 1
                raise OSError("503 Slow Down")
            super().get(url, path)

    monkeypatch.setattr(storage_folder, "WAITS", (0.0,))
    given, busy = tmp_path / "given", Busy(tmp_path)
    given.mkdir()
    (given / "checkpoint").write_text("of another execution")
    with checkpoint_store(busy, "key", True, str(given)) as store:
        assert store.path.read_text() == "of another execution"
    busy.failures, busy.attempt = 2, 5
    with (
        pytest.raises(RecoverableError, match=r"cannot tell whether .*/given has a checkpoint: OSError: 503 Slow Down"),
        checkpoint_store(busy, "key", True, str(given)),
    ):
        pass


def test_a_given_checkpoint_stays_a_given_one_until_the_ranks_have_accepted_it(tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "checkpoint").write_text("of another execution")
    found = []
    for attempt in range(3):
        stopping = suppress(PreemptedError)
        with stopping, checkpoint_store(Folders(tmp_path, attempt), "key", True, str(given)) as store:
            found.append((store.path.read_text(), store.is_given))
            if attempt == 1:
                store(started())
            raise PreemptedError("stopped on request")
    assert found == [("of another execution", is_given) for is_given in (True, True, False)]


def test_who_does_not_want_to_resume_starts_anew_also_where_the_pod_starts_again(stored):
    for _ in range(2):
        assert restored(NoCheckpoints(stored, 1), resume=False) == ""
    restored(NoCheckpoints(stored, 1))
    (stored / "pod-1" / "checkpoint").unlink()
    assert restored(Folders(stored, 1), resume=False) == ""


def test_what_the_storage_has_is_not_uploaded_again(stored):
    class Counting(Folders):
        uploaded: tuple[str, ...] = ()

        def put(self, path, url):
            self.uploaded = (*self.uploaded, path.name)
            super().put(path, url)

    own = Counting(stored)
    assert restored(own) == "half a training"
    assert own.uploaded == ()


class ReadsTwice(Folders):
    """Opens what it uploads a second time, as clients do that send a file in parts; rank 0 has written the next one."""

    def put(self, path, url):
        first = path.read_bytes()
        if path.name == "checkpoint":
            write_whole(self.working_folder() / "checkpoint", first + b" and more")
        self.seen = [*getattr(self, "seen", []), (first, path.read_bytes())]
        super().put(path, url)


class NoBucket(ReadsTwice):
    def put(self, path, url):
        super().put(path, url)
        raise FileNotFoundError("The specified bucket does not exist")


def test_a_bucket_that_is_not_there_is_said_though_a_newer_checkpoint_is(tmp_path, capsys):
    with checkpoint_store(NoBucket(tmp_path), "key", resume=True) as store:
        write_whole(store.path, b"half")
    assert "a checkpoint was not uploaded: FileNotFoundError: The specified bucket does not" in capsys.readouterr().err


@pytest.mark.parametrize("is_linked", [True, False])
def test_what_is_uploaded_stays_what_it_was(tmp_path, monkeypatch, is_linked):
    if not is_linked:
        monkeypatch.setattr(os, "link", refuse_links)
    platform_of_folders = ReadsTwice(tmp_path)
    with checkpoint_store(platform_of_folders, "key", resume=True) as store:
        write_whole(store.path, b"half")
        store(CheckpointWritten(0, 1, str(store.path), 0.0, 0.0))
    assert platform_of_folders.seen
    assert all(first == second for first, second in platform_of_folders.seen)


def refuse_links(*_):
    raise PermissionError("this file system has none")


class Uploading(Folders):
    """Does something while a checkpoint is uploaded."""

    def __init__(self, root, do):
        super().__init__(root)
        self.do = do

    def put(self, path, url):
        self.do()
        super().put(path, url)


def stopped_store(folders, until=math.inf):
    """A training that is asked to stop, and has written a checkpoint; then its upload begins."""
    with finishing() as finish_first, checkpoint_store(folders, "key", True) as store:
        finish_first()
        write_whole(store.path, b"the state")
        store(CheckpointWritten(0, 4, str(store.path), 0.0, 0.0))
        raise PreemptedError("stopped on request", until)


def test_no_further_signal_keeps_a_checkpoint_from_being_uploaded(tmp_path):
    def do():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)

    with pytest.raises(PreemptedError, match=r"^stopped on request$"):
        stopped_store(Uploading(tmp_path, do))
    assert (tmp_path / "0" / "checkpoints" / "checkpoint").read_bytes() == b"the state"


def test_an_upload_that_outlasts_the_grace_is_said_not_to_have_ended(tmp_path):
    go_on = threading.Event()
    words = (
        "^stopped on request; its checkpoint was not uploaded within the grace, so a resume begins with the one before"
    )
    with pytest.raises(PreemptedError, match=words):
        stopped_store(Uploading(tmp_path, go_on.wait), until=time.monotonic())
    assert not (tmp_path / "0" / "checkpoints" / "checkpoint").exists()
    go_on.set()


def test_a_checkpoint_that_is_stored_is_not_uploaded_again_as_the_store_closes(tmp_path):
    uploads: list[None] = []
    stored = threading.Event()

    def do():
        uploads.append(None)
        stored.set()

    with checkpoint_store(Uploading(tmp_path, do), "key", True) as store:
        write_whole(store.path, b"the state")
        store(CheckpointWritten(0, 4, str(store.path), 0.0, 0.0))
        assert stored.wait(30)
    assert len(uploads) == 1
