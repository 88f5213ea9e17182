"""The place of checkpoints between attempts: the user's folder for local runs, the platform's storage otherwise."""

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flyte_ddp.attempt.best_models import StoredModels, file_version, unused
from flyte_ddp.attempt.folders import runs_dir
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.storage_folder import StorageFolder, UploadThread, retry_storage
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, Observer, RunStarted
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.launch.grace import GRACE_VARIABLE
from flyte_ddp.lock import HeldError, held
from flyte_ddp.manifest import models_beside, read_manifest, remove_checkpoint, shards_beside, write_manifest
from flyte_ddp.report.console import say, say_interrupted, warn
from flyte_ddp.text import explain_error
from flyte_ddp.whole_files import LEFTOVER_SECONDS, link_or_copy, writing_to

ELSEWHERE = "elsewhere"  # the file in which an attempt without a checkpoint leaves the URL of an earlier one
PRIVATE = "-"  # marks the name of a folder whose checkpoint no other process may continue from
ABANDONED_SECONDS = 30 * 86400.0  # the age at which another training removes a local checkpoint


class CheckpointStore(StorageFolder, Observer):
    """A training's checkpoint on this machine, with its shards and best models beside it, and their copies.

    Nothing is uploaded unasked: local runs leave the checkpoint where rank 0 writes it. On many nodes, each rank has
    such a store as the engine's RankStorage.

    Attributes:
        path: the checkpoint on this machine.
        url: the folder of the checkpoint: a URL in the platform's storage, or a folder of this machine.
        is_given: whether the checkpoint is the one that options.resume_from names.
    """

    def __init__(self, platform: Platform, path: Path, url: str = "", is_by_ranks: bool = False):
        """Open the store.

        Args:
            platform: the platform.
            path: the checkpoint on this machine.
            url: the attribute; empty is the path's own folder.
            is_by_ranks: whether ranks upload and download the files of a sharded checkpoint themselves.
        """
        super().__init__(platform, url or str(path.parent), path.parent)
        self.path = path
        self.is_given = False
        self._is_by_ranks = is_by_ranks
        self._models = StoredModels(platform, path, self.url)
        self._taken: set[str] = set()  # the folders of shards that the manifest in the storage may name
        self._lock = threading.Lock()  # held while a checkpoint, or a manifest of ranks, replaces the one before

    def fetch_given(self, url: str) -> None:
        """Download the user's checkpoint to `path`, and set `is_given`.

        Nothing happens if there is a file at `path` already, or if `url` is empty.

        Args:
            url: the folder of the checkpoint, or a folder whose file ELSEWHERE names another one.

        Raises:
            InputError: There is no checkpoint.
            RecoverableError: The storage still fails after the last try.
        """
        if not url or self.path.exists():
            return
        if not retry_storage(f"cannot tell whether {url} has a checkpoint", lambda: self._find(url.rstrip("/"))):
            raise InputError(
                f"RunOptions.resume_from must be a folder with a checkpoint in it, got {url}: it is named in the log "
                "and in the report of the execution that was not finished; without it, training starts anew"
            )
        self.is_given = True

    def _find(self, url: str) -> str:
        """Download the checkpoint of a folder in the storage to `path`, and return the URL of the folder that had it.

        If the folder has no checkpoint, the folder that its text file ELSEWHERE names is searched instead, and so on.
        Only this attempt's own file is not followed: it is for the next attempt. If no folder has a checkpoint, or
        `url` is empty, "" is returned. Errors of the storage are raised.
        """
        if not url:
            return ""
        with suppress(FileNotFoundError):
            self._fetch_checkpoint(url)
            return url
        is_own = url == self.url  # this attempt's own file ELSEWHERE is for the next attempt
        return "" if is_own else self._find(StorageFolder(self._platform, url).fetch_text(ELSEWHERE))

    def _fetch_checkpoint(self, url: str) -> None:
        """Download a folder's checkpoint and its best models, and put the checkpoint at `path` once all is there.

        A sharded checkpoint is a manifest at `path`, with files of shards beside it. Shards that the storage lacks are
        left out. With is_by_ranks, the ranks download the shards later, from a URL that this method writes into the
        manifest. Raises FileNotFoundError if the folder has no checkpoint, and errors of the storage.
        """
        there = StorageFolder(self._platform, url, self.folder)
        models = StoredModels(self._platform, self.path, url)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            checkpoint = Path(folder, self.path.name)
            there.fetch(self.path.name, checkpoint)
            manifest = read_manifest(checkpoint)
            shards = f"{shards_beside(self.path).name}/{manifest['folder']}" if manifest else ""
            if manifest and self._is_by_ranks:
                write_manifest(checkpoint, {**manifest, "url": f"{url}/{shards}"})
            elif manifest:
                self._taken = {manifest["folder"]}
                for name in manifest["files"]:
                    with suppress(FileNotFoundError):  # ranks refuse an incomplete checkpoint, and name what is missing
                        there.fetch(f"{shards}/{name}")
            models.fetch_all()
            checkpoint.replace(self.path)
        if url == self.url:
            self._models = models

    # --- the engine's RankStorage ---

    def put_manifest(self, file: Path) -> None:
        """Upload the models that a sharded checkpoint needs, then its manifest. Raises OSError."""
        with self._lock:
            self._models.put_all(self._models.folder, lambda: self.put(file))

    def get(self, url: str, file: Path) -> None:
        """Download a file. Raises FileNotFoundError, or RecoverableError if the storage fails."""
        retry_storage(f"cannot read {url}", lambda: self._platform.get(url, file))


class PlatformStore(CheckpointStore):
    """A store that uploads checkpoints to the platform's storage, from which the next attempt restores them.

    A thread uploads, so that training never waits. While the thread is busy, only the newest checkpoint is kept for
    upload. The manifest of a sharded checkpoint comes last, and its files never replace those that the stored manifest
    names.
    """

    def __init__(self, platform: Platform, is_by_ranks: bool = False):
        super().__init__(platform, platform.working_folder() / "checkpoint", platform.checkpoint_url(), is_by_ranks)
        self._stored: tuple[int, ...] = ()  # the version of the checkpoint that is not to be uploaded (again)
        self._given: tuple[int, ...] = ()  # the version of a given checkpoint that the ranks have not accepted yet
        say(f"Checkpoints: {self.url}")
        self.uploads = UploadThread(self._upload)

    def restore(self, resume: bool) -> None:
        """Download the newest checkpoint to `path`, if there is one.

        The first of these checkpoints is downloaded:
        1. this attempt's own, which is there if only the processes were restarted;
        2. with `resume`, the previous attempt's;
        3. with `resume`, the one that the previous attempt would have resumed from.

        The second and third are then uploaded in the background as this attempt's own. If the first is missing, a
        file in this attempt's folder tells the next attempt where to look, even if the download fails.

        With is_by_ranks, ranks download a sharded checkpoint's shards themselves. Then `path` gets only the manifest,
        and nothing is uploaded.

        Args:
            resume: whether to look for the previous attempt's checkpoint.

        Raises:
            RecoverableError: The storage still fails after the last try.
        """
        previous = self._platform.previous_checkpoint_url() if resume else ""
        problem = f"cannot tell whether {previous or self.url} has a checkpoint"
        found = ""
        try:
            found = retry_storage(problem, lambda: self._find(self.url) or self._find(previous))
        finally:
            if found != self.url:
                point_to(self._platform, found or previous)
        if found == self.url:
            self._stored = self._version()
        if self.path.exists():
            self.uploads.wake()

    def fetch_given(self, url: str) -> None:
        """Download the user's checkpoint as CheckpointStore does, and upload it once the ranks have accepted it."""
        super().fetch_given(url)
        if self.is_given:  # uploaded now, the next attempt would take it for this one's own, even if ranks refuse it
            self._stored = self._given = self._version()

    def on_run_started(self, event: RunStarted) -> None:
        if self._given and self._given == self._stored:
            self._stored = self._given = ()
            self.uploads.wake()

    def on_checkpoint_written(self, event: CheckpointWritten) -> None:
        self.uploads.wake()

    def _upload(self, is_last: bool) -> None:
        try:
            if self.path.exists() and self._version() != self._stored:
                self._put_newest()
        except Exception as error:  # the next upload may succeed
            warn(f"a checkpoint was not uploaded: {explain_error(error)}")

    def _version(self) -> tuple[int, ...]:
        """Return numbers that are others once the checkpoint at the path has been replaced."""
        return file_version(self.path)

    def _put_newest(self) -> None:
        """Upload the checkpoint at `path`, with its shards and best models.

        All files are first linked or copied into a temporary folder, because the ranks may remove them meanwhile.
        Nothing is uploaded in two cases:
        - The checkpoint is sharded, and its ranks upload it themselves (is_by_ranks).
        - The ranks replace the checkpoint during this call. Then this method is called again for the newer one.

        Raises:
            OSError: An upload fails, or a file of the checkpoint is missing.
        """
        version = self._version()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            pinned = Path(folder, self.path.name)
            try:
                link_or_copy(self.path, pinned)
                manifest = read_manifest(pinned) or {}
                if manifest and self._is_by_ranks:
                    return
                for name in manifest.get("files", ()):
                    link_or_copy(shards_beside(self.path) / manifest["folder"] / name, pinned.with_name(name))
            except FileNotFoundError:
                if self._version() == version:
                    raise
            for model in models_beside(self.path).glob("*.pt"):
                with suppress(FileNotFoundError):  # the newest checkpoint does without a model that is gone
                    link_or_copy(model, pinned.with_name(model.name))
            with self._lock:
                if self._version() == version:  # the event of a newer checkpoint would follow
                    self._models.put_all(pinned.parent, partial(self._put_checkpoint, pinned, manifest))
                    self._stored = version

    def _put_checkpoint(self, pinned: Path, manifest: dict[str, Any]) -> None:
        """Upload a checkpoint, in place of the one in the storage.

        The files of a sharded checkpoint are uploaded first, into a numbered folder that the stored manifest does not
        use. The new manifest names that folder, and is uploaded last. So the stored checkpoint is complete at any time.
        Nothing is removed from the storage, but a folder that no manifest names is used again.

        Args:
            pinned: the checkpoint on this machine: one file, or a manifest beside the files of shards. This method
                rewrites the manifest.
            manifest: the content of the manifest; empty for a checkpoint that is one file.

        Raises:
            OSError: An upload fails.
        """
        slot = unused(self._taken)
        if manifest:
            for name in manifest["files"]:
                self.put(pinned.with_name(name), f"{shards_beside(self.path).name}/{slot}/{name}")
            write_manifest(pinned, {**manifest, "folder": slot})
            self._taken.add(slot)  # stays taken if an error leaves it unknown whether the manifest has arrived
        self.put(pinned, self.path.name)
        self._taken = {slot}


def point_to_previous(platform: Platform) -> None:
    """Tell the next attempt where the checkpoint of the previous one is.

    The next attempt only knows this attempt, which may end before it has its data or a checkpoint of its own.
    """
    if not platform.is_local():
        point_to(platform, platform.previous_checkpoint_url())


def point_to(platform: Platform, url: str) -> None:
    """Tell the next attempt to look for its checkpoint in the folder at the URL, unless the URL is empty."""
    if url:
        with suppress(OSError):  # if storage cannot be written to, Flyte does not even get this attempt's outcome
            StorageFolder(platform, platform.checkpoint_url()).put_text(url, ELSEWHERE)


@contextmanager
def checkpoint_store(
    platform: Platform, key: str, resume: bool, resume_from: str = "", is_by_ranks: bool = False
) -> Iterator[CheckpointStore]:
    """Open the store of this training's checkpoint, and put the checkpoint to resume from at the store's `path`.

    A context manager. Without a checkpoint to resume from, there is no file at `path`.

    In a local run, the checkpoint's folder is removed when the block has succeeded, and otherwise stays. After Ctrl-C
    or a SIGTERM a line says how to continue. If another process holds the folder, this run gets a private one, which is
    always removed.

    On a cluster, checkpoints are uploaded during the block, and its end waits until the newest one is uploaded. After a
    preemption it waits only for the pod's grace, the time from the SIGTERM to the SIGKILL. A failed upload is only a
    warning.

    Args:
        platform: the platform.
        key: names the folder of the checkpoint in a local run, so that only the same training finds it.
        resume: whether to use an earlier checkpoint of this training: the local one, or the previous attempt's. If not,
            a local run removes its earlier checkpoint. On a cluster, a checkpoint of this same attempt is used in any
            case.
        resume_from: the folder of the checkpoint to use if there is no earlier one; empty is none.
        is_by_ranks: whether ranks on many nodes upload and download the files of a sharded checkpoint themselves.

    Yields:
        The store.

    Raises:
        InputError: The folder resume_from has no checkpoint, or the local folder for runs cannot be written to.
        RecoverableError: The storage does not deliver the checkpoint.
        PreemptedError: The block raised it. If the upload did not finish in the grace, the message says so.
    """
    if platform.is_local():
        with _local_folder(key) as folder:
            local = CheckpointStore(platform, folder / "checkpoint")
            if not resume:
                remove_checkpoint(local.path)
            local.fetch_given(resume_from)
            try:
                yield local
            except (KeyboardInterrupt, PreemptedError):
                if PRIVATE not in folder.name:
                    say_interrupted(local.path, resume)
                raise
            shutil.rmtree(folder, ignore_errors=True)  # only a successful training gets here
        return
    store = PlatformStore(platform, is_by_ranks)
    try:
        store.restore(resume)
        store.fetch_given(resume_from)
        yield store
    except PreemptedError as stopped:
        if store.uploads.close(stopped.until):
            raise
        raise PreemptedError(
            f"{stopped}; its checkpoint was not uploaded within the grace, so a resume begins with the one before it: "
            f"if the platform gives longer, say so by {GRACE_VARIABLE}"
        ) from None
    except BaseException:
        store.uploads.close()
        raise
    else:
        store.uploads.close()


@contextmanager
def _local_folder(key: str) -> Iterator[Path]:
    """Create the folder of a training's local checkpoint, and hold it while the block runs.

    If another process holds the folder, the block gets a private folder, which is removed at the end. Abandoned
    checkpoints of other trainings are removed before the block runs. Raises InputError if the folder for runs cannot be
    written to.
    """
    folder = runs_dir() / "checkpoints" / key
    with ExitStack() as stack:
        with writing_to(runs_dir(), "DDP_RUNS_DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(held(folder))
            except (HeldError, FileNotFoundError):  # another process holds the folder, or has just removed it
                folder = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{key}{PRIVATE}"))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                stack.enter_context(held(folder))
            remove_abandoned(folder.parent)  # not before: this training's own checkpoint may be as old
        yield folder


def remove_abandoned(folder: Path) -> None:
    """Remove the local checkpoints that nobody will continue from.

    A private folder, whose name has a "-", is removed an hour after its last change. Any other folder is removed after
    30 days, and a line on the console says so. Folders that another process holds, or that cannot be removed, stay. On
    a file system without locks, all stay.

    Args:
        folder: the folder that has a folder for each training's checkpoint.
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
