"""The place of checkpoints between attempts: the user's folder for local runs, the platform's storage otherwise."""

import contextvars
import itertools
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flyte_ddp.attempt.best_models import StoredModels, get_file
from flyte_ddp.attempt.folders import runs_dir
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.errors import InputError, RecoverableError
from flyte_ddp.events import CheckpointWritten, Observer
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.launch.grace import GRACE_VARIABLE
from flyte_ddp.lock import HeldError, held
from flyte_ddp.manifest import models_beside, read_manifest, remove_checkpoint, shards_beside, write_manifest
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say, warn
from flyte_ddp.whole_files import LEFTOVER_SECONDS, link_or_copy, temporary_beside, writing_to

WAITS = (2.0, 10.0, 60.0)  # seconds before each further try; the storage's client retries several times by itself
ELSEWHERE = "elsewhere"  # the file in which an attempt without a checkpoint leaves the URL of an earlier one
PRIVATE = "-"  # marks the name of a folder whose checkpoint no other process may continue from
ABANDONED_SECONDS = 30 * 86400.0  # the age at which another training removes a local checkpoint
Value = TypeVar("Value")


class Store(Observer):
    """A store that leaves checkpoints where rank 0 writes them.

    Attributes:
        path: the checkpoint on this machine.
        folder: the folder of the checkpoint: a URL in the platform's storage, or a folder of this machine.
        is_given: whether the checkpoint is the one that options.resume_from names.
    """

    def __init__(self, path: Path, platform: Platform, folder: str = ""):
        self.path = path
        self.folder = folder or str(path.parent)
        self.is_given = False
        self._platform = platform
        self._models = StoredModels(platform, self.folder, path)

    def fetch_given(self, url: str) -> None:
        """Download the checkpoint that the user names, unless this training already has one.

        Args:
            url: the folder of the checkpoint; empty is none.

        Raises:
            InputError: The folder has no checkpoint.
            RecoverableError: The storage still fails after the last try.
        """
        if not url or self.path.exists():
            return
        if not patiently(f"cannot tell whether {url} has a checkpoint", lambda: self._fetch(url.rstrip("/"))):
            raise InputError(
                f"RunOptions.resume_from must be a folder with a checkpoint in it, got {url}: it is named in the log "
                "and in the report of the execution that was not finished; without it, training starts anew"
            )
        self.is_given = True

    def _fetch(self, url: str) -> str:
        """Download the checkpoint of a folder in the storage, or of the folder that its file ELSEWHERE names.

        Returns:
            The folder that had the checkpoint; empty if there is none.
        """
        with suppress(FileNotFoundError):
            self._get_checkpoint(url)
            return url
        if url == self.folder:  # this attempt's own file ELSEWHERE is for the next attempt
            return ""
        with suppress(FileNotFoundError):
            elsewhere = self.path.with_name(ELSEWHERE)
            get_file(self._platform, f"{url}/{ELSEWHERE}", elsewhere)
            return self._fetch(elsewhere.read_text())
        return ""

    def _get_checkpoint(self, url: str) -> None:
        """Download a folder's checkpoint and the files beside it, and put the checkpoint at its path.

        Args:
            url: the folder.

        Raises:
            FileNotFoundError: The folder has no checkpoint.
        """
        beside = temporary_beside(self.path)
        models = StoredModels(self._platform, url, self.path)
        try:
            self._platform.get(f"{url}/{self.path.name}", beside)
            if manifest := read_manifest(beside):
                self.get_shards(url, beside, manifest)
            models.get()
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)
        if url == self.folder:
            self._models = models

    def get_shards(self, url: str, manifest_file: Path, manifest: dict[str, Any]) -> None:
        folder = shards_beside(self.path) / manifest["folder"]
        folder.mkdir(parents=True, exist_ok=True)
        for name in manifest["files"]:
            with suppress(FileNotFoundError):  # ranks refuse an incomplete checkpoint, and name what is missing
                get_file(self._platform, f"{url}/{folder.parent.name}/{folder.name}/{name}", folder / name)


def patiently(problem_with: str, call: Callable[[], Value]) -> Value:
    """Call a function, and call it again after a while if storage fails.

    Args:
        problem_with: the beginning of the error.
        call: the function.

    Raises:
        FileNotFoundError: the storage says that there is no such file.
        RecoverableError: storage still fails after the last try.
    """
    for seconds in (*WAITS, None):
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # each storage has its own errors
            problem = f"{type(error).__name__}: {one_line(error)}"
        if seconds is None:
            break
        say(f"The checkpoint cannot be read yet, next try in {seconds:g} s: {problem}")
        time.sleep(seconds)
    raise RecoverableError(f"{problem_with}: {problem}: check access")


class PlatformStore(Store):
    """A store that uploads checkpoints to the platform's storage, from which the next attempt restores them.

    A thread uploads, so that training never waits. While the thread is busy, only the newest checkpoint is kept for
    upload. The manifest of a sharded checkpoint comes last, and its files never replace those that the stored manifest
    names.
    """

    def __init__(self, path: Path, platform: Platform):
        super().__init__(path, platform, platform.checkpoint_url())
        self._new = threading.Event()
        self._closing = False
        self._stored: os.stat_result | None = None  # the status of the checkpoint that is in the storage
        self._taken: set[str] = set()  # the folders of shards that the manifest in the storage may name
        say(f"Checkpoints: {self.folder}")
        # Only in this thread's context does the platform know its storage
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._upload,), daemon=True)
        self._thread.start()

    def restore(self, resume: bool) -> None:
        """Download the newest checkpoint, if there is one.

        The attempt's own checkpoint comes first; it exists if only the processes were restarted. Without one, and with
        resume, the previous attempt's checkpoint is downloaded and saved as this attempt's own. Until then, a file
        tells the next attempt where the checkpoint is.

        Args:
            resume: whether the previous attempt's checkpoint may be used.

        Raises:
            RecoverableError: The storage does not deliver the checkpoint.
        """
        previous = self._platform.previous_checkpoint_url()
        if resume:
            point_to_previous(self._platform)
        urls = [self.folder, previous] if resume and previous else [self.folder]

        def find() -> str:
            return next(filter(None, map(self._fetch, urls)), "")

        try:
            if url := patiently(f"cannot tell whether {urls[-1]} has a checkpoint", find):
                self.hand_on(url)
        except RecoverableError:
            if resume:
                point_to_previous(self._platform)  # the storage may have failed at the first call, too
            raise

    def hand_on(self, url: str) -> None:
        """Make the checkpoint that was found in this folder this attempt's own."""
        if manifest := read_manifest(self.path):
            self._taken = {manifest["folder"]}
        self._new.set()

    def on_checkpoint_written(self, event: CheckpointWritten) -> None:
        self._new.set()

    def close(self) -> None:
        """Wait without a limit until the newest checkpoint is uploaded, and end the uploading thread."""
        self.close_by(math.inf)

    def close_by(self, until: float) -> bool:
        """Upload the newest checkpoint if it is not in the storage yet, and end the uploading thread.

        An upload that fails is only a warning.

        Args:
            until: when to stop waiting, on the clock of time.monotonic(); math.inf waits without a limit.

        Returns:
            Whether the thread has ended. If it has not, the upload is still running.
        """
        self._closing = True
        self._new.set()
        self._thread.join(None if until == math.inf else max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _upload(self) -> None:
        while True:
            self._new.wait()
            self._new.clear()
            closing = self._closing
            try:
                if self.path.exists() and not (self._stored and self._is_still(self._stored)):
                    self.put_newest()
            except Exception as error:  # each storage has its own errors; the next upload may succeed
                warn(f"a checkpoint was not uploaded: {type(error).__name__}: {error}")
            if closing:
                return

    def put_newest(self) -> None:
        models = models_beside(self.path)
        folder = temporary_beside(self.path)
        pinned = folder / self.path.name
        status = self.path.stat()
        try:
            folder.mkdir()
            try:
                link_or_copy(self.path, pinned)  # the ranks remove the files once they have written newer ones
                if manifest := read_manifest(pinned):
                    self.pin_shards(manifest, folder)
            except FileNotFoundError:
                if self._is_still(status):
                    raise
            for model in models.glob("*.pt"):
                with suppress(FileNotFoundError):  # the newest checkpoint does without a model that is gone
                    link_or_copy(model, folder / model.name)
            if self._is_still(status):  # the event of a newer checkpoint would follow
                self._models.put(folder, partial(self.put_checkpoint, pinned, manifest))
                self._stored = status
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_still(self, status: os.stat_result) -> bool:
        """Return whether the checkpoint at the path is still the one with this status."""
        now = self.path.stat()
        return os.path.samestat(now, status) and now.st_mtime_ns == status.st_mtime_ns

    def pin_shards(self, manifest: dict[str, Any], folder: Path) -> None:
        for name in manifest["files"]:
            link_or_copy(shards_beside(self.path) / manifest["folder"] / name, folder / name)

    def put_checkpoint(self, pinned: Path, manifest: dict[str, Any] | None) -> None:
        """Upload a checkpoint. For a sharded one, upload the files beside it first, and the manifest last.

        Nothing is removed from the storage. The folders of shards use a few numbers as names, again and again.

        Args:
            pinned: the checkpoint, or the manifest of a sharded one. The files of its shards lie beside it.
            manifest: the content of the manifest; None for a checkpoint that is not sharded.
        """
        url = f"{self.folder}/{self.path.name}"
        if manifest is None:
            return self._platform.put(pinned, url)
        slot = next(name for name in map(str, itertools.count()) if name not in self._taken)
        for name in manifest["files"]:
            self._platform.put(pinned.with_name(name), f"{self.folder}/{shards_beside(self.path).name}/{slot}/{name}")
        self._taken.add(slot)  # stays taken if an error leaves it unknown whether the manifest has arrived
        renamed = pinned.with_name("manifest")
        write_manifest(renamed, {**manifest, "folder": slot})
        self._platform.put(renamed, url)
        self._taken = {slot}


def point_to_previous(platform: Platform) -> None:
    """Tell the next attempt where the checkpoint of the previous one is.

    The next attempt only knows this attempt, which may end before it has its data or a checkpoint of its own.
    """
    if not platform.is_local() and (previous := platform.previous_checkpoint_url()):
        point_to(platform, previous)


def point_to(platform: Platform, url: str) -> None:
    elsewhere = platform.working_folder() / ELSEWHERE
    elsewhere.write_text(url)
    with suppress(Exception):  # if storage cannot be written to, Flyte does not even get this attempt's outcome
        platform.put(elsewhere, f"{platform.checkpoint_url()}/{ELSEWHERE}")


NewStore = Callable[[Path, Platform], PlatformStore]


@contextmanager
def checkpoint_store(
    platform: Platform, key: str, resume: bool, resume_from: str = "", stored: NewStore = PlatformStore
) -> Iterator[Store]:
    """Open the store of this training's checkpoint, with the checkpoint to resume from at its path.

    With resume, that is an earlier attempt's checkpoint. If there is none, it is the one in the folder resume_from. In
    a local run, the folder of the checkpoint is removed after a successful training. On a platform, the end of the
    block waits for the upload of the newest checkpoint; after a preemption, at most for the grace.

    Args:
        platform: the platform.
        key: the digest of everything that determines the training's result.
        resume: whether to resume from an earlier attempt.
        resume_from: the folder of a checkpoint that the user names; empty is none.
        stored: creates the store outside of local runs.

    Raises:
        InputError: The folder resume_from has no checkpoint.
        RecoverableError: The storage does not deliver the checkpoint.
        PreemptedError: The training was preempted. The message says if the upload did not finish in the grace.
    """
    if platform.is_local():
        with _local_folder(key) as folder:
            path = folder / "checkpoint"
            if not resume:
                remove_checkpoint(path)
            store = Store(path, platform)
            store.fetch_given(resume_from)
            yield store
            shutil.rmtree(folder, ignore_errors=True)  # only a successful training gets here
        return
    store = stored(platform.working_folder() / "checkpoint", platform)
    try:
        store.restore(resume)
        store.fetch_given(resume_from)
        yield store
    except PreemptedError as stopped:
        if store.close_by(stopped.until):
            raise
        raise PreemptedError(
            f"{stopped}; its checkpoint was not uploaded within the grace, so a resume begins with the one before it: "
            f"if the platform gives longer, say so by {GRACE_VARIABLE}"
        ) from None
    except BaseException:
        store.close()
        raise
    else:
        store.close()


@contextmanager
def _local_folder(key: str) -> Iterator[Path]:
    """Create and hold the folder of this training's local checkpoint while the block runs.

    If another process holds that folder, the block gets a private folder, which is removed at the end. Abandoned
    checkpoints of other trainings are removed first.

    Args:
        key: the digest of what determines the training's result.

    Raises:
        InputError: The folder for runs cannot be written to.
    """
    folder = runs_dir() / "checkpoints" / key
    with ExitStack() as stack:
        with writing_to(runs_dir(), "DDP_RUNS_DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(folder.parent)
            try:
                stack.enter_context(held(folder))
            except (HeldError, FileNotFoundError):  # another process holds the folder, or has just removed it
                folder = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{key}{PRIVATE}"))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                stack.enter_context(held(folder))
        yield folder


def remove_abandoned(folder: Path) -> None:
    """Remove local checkpoints that nobody will continue from.

    A private folder is removed an hour after its last change, and any other after 30 days. Folders that another process
    holds stay.

    Args:
        folder: the folder that has the folders of all checkpoints.
    """
    for one in folder.iterdir():
        is_private = PRIVATE in one.name
        with suppress(OSError, HeldError):
            idle = time.time() - max(file.stat().st_mtime for file in (one, *one.rglob("*")))
            if idle < (LEFTOVER_SECONDS if is_private else ABANDONED_SECONDS):
                continue
            with held(one) as is_sure:
                if is_sure:
                    shutil.rmtree(one)
                if is_sure and not is_private:
                    say(f"Removed {one}, the checkpoint of a training that has stood still for {idle / 86400:.0f} days")
