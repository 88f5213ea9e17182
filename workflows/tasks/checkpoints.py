"""Where checkpoints live between attempts: in the user's folder for local runs, in Flyte's storage on a cluster."""

import contextvars
import fcntl
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from flytekit import current_context
from flytekit.core.checkpointer import Checkpoint

from workflows.tasks.execution import is_local, runs_dir
from workflows.training.events import CheckpointWritten, Event


class LocalStore:
    """Checkpoints stay where rank 0 writes them."""

    def __init__(self, path: Path):
        self.path = path

    def on_event(self, event: Event) -> None:
        pass


class FlyteStore:
    """Sends each checkpoint to Flyte's storage, from where the next attempt takes it.

    A thread uploads, so that training never waits; while it is busy, only the newest checkpoint is waiting.
    """

    def __init__(self, path: Path, checkpoint: Checkpoint):
        self.path, self._checkpoint = path, checkpoint
        self._new, self._closing = threading.Event(), False
        # the thread needs this one's Flyte context, which knows the storage
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._upload,), daemon=True)
        self._thread.start()

    def restore(self) -> None:
        """Brings the attempt before this one's checkpoint, and saves it as this attempt's own: the next attempt would
        find nothing if this one ended before its first checkpoint."""
        content = self._checkpoint.read()
        if content:
            self.path.write_bytes(content)
            self._new.set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, CheckpointWritten):
            self._new.set()

    def close(self) -> None:
        """Waits for the newest checkpoint to be uploaded."""
        self._closing = True
        self._new.set()
        self._thread.join()

    def _upload(self) -> None:
        while True:
            self._new.wait()
            self._new.clear()
            closing = self._closing
            if self.path.exists():
                self._checkpoint.save(self.path)
            if closing:
                return


@contextmanager
def checkpoint_store(key: str, resume: bool) -> Iterator["LocalStore | FlyteStore"]:
    """The place of this training's checkpoint, with the one of an earlier attempt in it if resume is wished."""
    if is_local():
        with _local_folder(key) as folder:
            path = folder / "checkpoint"
            if not resume:
                path.unlink(missing_ok=True)
            yield LocalStore(path)
            shutil.rmtree(folder)  # only reached when training succeeded
        return
    store = FlyteStore(Path(current_context().working_directory) / "checkpoint", current_context().checkpoint)
    try:
        if resume:
            store.restore()
        yield store
    finally:
        store.close()


@contextmanager
def _local_folder(key: str) -> Iterator[Path]:
    """The folder for the checkpoint of this training, or one for this process if another is at the same training."""
    folder = runs_dir() / "checkpoints" / key
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        folder = folder.with_name(f"{key}-{os.getpid()}")
        folder.mkdir()
    try:
        yield folder
    finally:
        os.close(lock)
