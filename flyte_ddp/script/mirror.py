"""The mirror of a script's checkpoints in the platform's storage, of which an attempt never finds half a checkpoint."""

import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flyte_ddp.attempt.best_models import unused
from flyte_ddp.attempt.checkpoints import CheckpointStore
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.storage_folder import StorageFolder, UploadThread, retry_storage
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, Event
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.launch.grace import GRACE_VARIABLE
from flyte_ddp.manifest import read_manifest, write_manifest
from flyte_ddp.report.console import say, warn
from flyte_ddp.text import explain_error
from flyte_ddp.whole_files import link_or_copy, replacing

QUIET_SECONDS = 5.0  # a file or folder that nobody has changed for so long is taken for complete
BUSY_SECONDS = 300.0  # until a warning says that a file or folder is never quiet
OBJECTS = "files"  # the folder in the storage whose objects the manifest names
Version = tuple[int, int, str]  # a file's time of change in nanoseconds and its size; or a link's time, 0 and target
Entries = dict[str, dict[str, Version]]  # the files below each file or folder at the top, by their relative paths


@dataclass(frozen=True)
class Copy:
    """A file's copy in the storage, and the version of the local file that it is a copy of. A link has no URL."""

    url: str
    version: Version


class CheckpointMirror:
    """A folder's copy in the storage: objects under names of their own, and a manifest, which is replaced last.

    Whatever lies directly in the folder, a file or a folder with all that is in it, is taken as one entry: it is
    uploaded once it has been quiet, and until then the manifest names its copy from before. An upload goes on to its
    end even if the script removes the entry meanwhile. A name is used again only once the manifest in the storage does
    without it. A recipe's sharded checkpoints have such a manifest, too, and so the next attempt finds it in the same
    way. Links are never followed: the manifest has their targets.

    Attributes:
        step: the newest step that the script has told of.
        figures: the newest value of each figure that it has told.
    """

    def __init__(
        self,
        platform: Platform,
        folder: Path,
        manifest: Path,
        storage: CheckpointStore | None,
        now: Callable[[], float] = time.monotonic,
    ):
        """Open the mirror.

        Args:
            platform: the platform.
            folder: the folder on this machine.
            manifest: the manifest on this machine, where an earlier one may be.
            storage: uploads files; None in a local run, in which nothing is.
            now: returns the time in seconds.
        """
        self.step = 0
        self.figures: dict[str, float] = {}
        self._whole_until = 0.0
        self._now = now
        self._platform = platform
        self._folder = folder
        self._manifest = manifest
        self._storage = storage
        self._copies: dict[str, dict[str, Copy]] = {}  # what the manifest names, by entry and relative path
        self._fresh: dict[str, Copy] = {}  # what was uploaded since then, by relative path
        self._taken: set[str] = set()  # names of objects that the manifest in the storage may name
        self._entries: Entries = {}
        self._changed: dict[str, float] = {}  # when each entry was last seen to be another, by the clock
        self._busy: dict[str, float] = {}  # since when each entry that is not quiet has been so, by the clock
        self._warned: set[str] = set()
        self._emit: Callable[[Event], None] = lambda event: None

    def restore(self) -> None:
        """Download to the folder of checkpoints what the manifest on this machine names, and delete its other files.

        The method also sets `step` and `figures` to those in the manifest. Files that the folder already has in the
        right version are kept. Nothing is done without a manifest, or in a local run whose folder has files from an
        earlier run. Call this method before each start of the ranks.

        Raises:
            InputError: the manifest, which resume_from may name, is not that of a script; or a file that it names is
                gone.
            RecoverableError: the storage does not deliver a file.
        """
        is_own = self._storage is None and any(self._folder.iterdir())  # an earlier local run has left it
        if is_own or not self._manifest.exists():
            return
        wanted = self._read_manifest()
        there = {name: version for files in self._scan().values() for name, version in files.items()}
        for name, version in there.items():
            if name not in wanted or wanted[name].version != version:
                (self._folder / name).unlink()
        for parent, _, _ in os.walk(self._folder, topdown=False):
            with suppress(OSError):  # it has files
                if Path(parent) != self._folder:
                    os.rmdir(parent)
        if self._storage:
            self._fill(self._folder, wanted)
        else:  # the next run would take a part of the files for those of an earlier run
            with tempfile.TemporaryDirectory(dir=self._folder.parent) as beside:
                whole = Path(beside, self._folder.name)
                whole.mkdir()
                self._fill(whole, wanted)
                whole.rename(self._folder)
        self._taken |= self._own_names(wanted.values())
        self._entries = self._scan()
        if wanted:
            say(f"Files of the script's checkpoints that were restored: {len(wanted)}")

    def _fill(self, folder: Path, wanted: Mapping[str, Copy]) -> None:
        """Restore the files and links that the folder lacks, and the times of change of all files and folders.

        Args:
            folder: the folder to fill. It has no files but wanted ones.
            wanted: the copies that the folder is to have, by relative path.

        Raises:
            InputError: a file in the storage was removed or replaced.
            RecoverableError: the storage fails.
        """
        for name in sorted(wanted, key=lambda name: not wanted[name].url):  # links last, so that none is followed
            path = folder / name
            if not os.path.lexists(path):
                self._fetch(wanted[name], path)
            restored = _version(path, folder)
            assert restored is not None
            self._copies.setdefault(_entry(name), {})[name] = Copy(wanted[name].url, restored)
        for parent, folders, names in os.walk(folder, topdown=False):
            times = [os.lstat(Path(parent, name)).st_mtime_ns for name in (*folders, *names)]
            newest = max(times, default=0)
            if times:  # scripts look for the newest folder, too
                os.utime(parent, ns=(newest, newest))

    def _read_manifest(self) -> dict[str, Copy]:
        """Return the copies that the manifest on this machine names, by relative path.

        The method also sets `step` and `figures` to those in the manifest.

        Raises:
            InputError: the manifest is damaged, or not that of a script's checkpoints, or names a path outside of their
                folder.
            OSError: there is no manifest, or it cannot be read.
        """
        try:
            found = read_manifest(self._manifest) or {}
            urls = found["objects"]
            self.step = int(found["step"])
            self.figures = {str(name): float(value) for name, value in found["figures"].items()}
            copies = {}
            for name, (changed, size, target) in found["versions"].items():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise ValueError
                copies[name] = Copy("" if target else str(urls[name]), (int(changed), int(size), str(target)))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(
                "RunOptions.resume_from must be the checkpoint folder of a script's execution, got one of another "
                "training: leave it out, or give the folder that the script's log names after Checkpoints"
            ) from None
        return copies

    def _fetch(self, copy: Copy, path: Path) -> None:
        """Restore one file from the storage, or one link, with its time of change.

        Args:
            copy: the URL and version of the file. A link has no URL; its version has the target.
            path: where to put the file or link.

        Raises:
            InputError: the file in the storage was removed or replaced.
            RecoverableError: the storage fails.
        """
        changed, size, target = copy.version
        if target:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        else:
            there, _, file = copy.url.rpartition("/")
            folder = StorageFolder(self._platform, there)
            with suppress(FileNotFoundError):
                retry_storage(f"cannot read {copy.url}", lambda: folder.fetch(file, path))
            if not path.exists() or path.stat().st_size != size:
                raise InputError(f"the checkpoint's file {copy.url} was removed or replaced: start anew, without it")
        os.utime(path, ns=(changed, changed), follow_symlinks=False)

    @contextmanager
    def following(self, emit: Callable[[Event], None], whole_until: Callable[[bool], float]) -> Iterator[None]:
        """Upload checkpoints in a thread while the block runs, and once more when it ends or raises; a context manager.

        An entry, which is a file or folder at the top of the checkpoints, is uploaded when it has been quiet for
        QUIET_SECONDS. Without a storage nothing is uploaded. An upload that fails prints a warning, and is tried again.
        The end of the block waits for the last upload. After a PreemptedError, it waits only until the grace of the
        platform ends, and prints a warning if that is too short. Errors of the block are raised unchanged.

        Args:
            emit: gets a CheckpointWritten after each new manifest, from the thread.
            whole_until: is called after the block with a bool, whether the ranks were asked to stop. It returns a time
                in nanoseconds since 1970. Entries that have last changed before this time are complete, so the last
                upload includes them even if they are not quiet.
        """
        if self._storage is None:
            yield
            return
        self._emit = emit
        self._whole_until = 0.0
        thread = UploadThread(self._upload, QUIET_SECONDS)
        until = math.inf
        is_stop = False
        try:
            yield
        except PreemptedError as stopped:
            until = stopped.until
            is_stop = True
            raise
        finally:
            self._whole_until = whole_until(is_stop)
            if not thread.close(until):
                warn(
                    "the script's checkpoints were not all uploaded within the grace, so a resume begins with those "
                    f"before: if the platform gives longer, say so by {GRACE_VARIABLE}"
                )

    def _upload(self, is_last: bool) -> None:
        try:
            self.upload_quiet(self._whole_until if is_last else 0.0)
        except Exception as error:  # the next round may succeed
            self._warn_once("", f"checkpoints of the script were not uploaded: {explain_error(error)}")
        else:
            self._warned.discard("")

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn(text)

    def upload_quiet(self, whole_until: float = 0.0) -> None:
        """Upload the entries that are quiet and have changed, then a manifest that names the new copies.

        An entry is a file or folder at the top of the checkpoints. It is quiet if nothing has changed it for
        QUIET_SECONDS. Without any change, no manifest is written. An entry that was deleted stays in the manifest until
        a new entry arrives: a script may remove its last checkpoint before it writes the next one.

        Entries are uploaded in the order of their last changes. If the storage does not take an entry, the later ones
        wait for it: one of them may be a small file that names this entry. Deleted entries then stay in the manifest.
        After a new manifest, the method emits a CheckpointWritten.

        Args:
            whole_until: a time in nanoseconds since 1970. Entries that have last changed before it count as quiet. With
                math.inf all entries do, and deleted entries leave the manifest, unless no entry is left.

        Raises:
            OSError: the storage fails, or has not taken an entry. Entries that changed before this one are uploaded.
        """
        now = self._now()
        started = time.time()
        step = self.step
        entries = self._scan()
        known = {*entries, *self._entries, *self._copies}
        self._changed |= {one: now for one in known if entries.get(one) != self._entries.get(one)}
        self._entries = entries
        quiet = {one for one in known if now - self._changed.get(one, -math.inf) >= QUIET_SECONDS}
        newest = {one: max(changed for changed, _, _ in files.values()) for one, files in entries.items()}
        quiet |= {one for one in known if newest.get(one, math.inf) <= whole_until}
        busy = {*entries} - quiet
        there = {name: version for files in entries.values() for name, version in files.items()}
        self._fresh = {name: copy for name, copy in self._fresh.items() if there.get(name) == copy.version}
        copies = dict(self._copies)
        has_new = whole_until == math.inf
        problem = ""
        # Clocks of file systems are coarse: of two with the same time, the larger one is not the one that names another
        sizes = {one: sum(size for _, size, _ in files.values()) for one, files in entries.items()}
        for entry in sorted(quiet & {*entries}, key=lambda one: (newest[one], -sizes[one])):
            try:
                copied = self._put_entry(entry, entries[entry])
            except OSError as error:
                problem = f"{entry}: {explain_error(error)}; later ones wait until it is uploaded or removed"
                break
            if copied is not None:
                has_new |= entry not in copies
                copies[entry] = copied
            else:
                busy.add(entry)
        self._warn_of_busy_entries(busy, now)
        if entries and has_new and not problem:
            copies = {one: files for one, files in copies.items() if one in entries or one not in quiet}
        if copies != self._copies:
            self._move_manifest(copies, step)
            self._emit(CheckpointWritten(0, step, str(self._folder), 0.0, time.time() - started))
        if problem:
            raise OSError(problem)

    def _warn_of_busy_entries(self, busy: set[str], now: float) -> None:
        """Warn of entries that have been busy for BUSY_SECONDS, once for each entry.

        An entry is a file or folder at the top of the checkpoints.

        Args:
            busy: the entries that were not quiet at this time, or have changed during their upload.
            now: the time in seconds, by the mirror's own clock.
        """
        self._busy = {one: self._busy.get(one, now) for one in busy}
        for one, since in self._busy.items():
            if now - since >= BUSY_SECONDS:
                self._warn_once(
                    one,
                    f"{one} in $DDP_CHECKPOINT_DIR changes all the time, so that it is not uploaded before the end: "
                    "keep checkpoints beside it, each under a name of its own",
                )

    def _put_entry(self, entry: str, files: Mapping[str, Version]) -> dict[str, Copy] | None:
        """Upload those files of an entry that the storage lacks. Links are not uploaded.

        Hard links outside the folder, or copies, keep the files until they are uploaded.

        Args:
            entry: a file or folder at the top of the checkpoints.
            files: the version of each file and link of the entry, by relative path.

        Returns:
            The copies of all files and links, by relative path; None if the entry has changed meanwhile, or was removed
            before the upload began. What is removed during the upload does not count as a change.

        Raises:
            OSError: the storage has not taken a file. The files before it are not uploaded again.
        """
        assert self._storage is not None
        before = {**self._copies.get(entry, {}), **self._fresh}
        copies = {name: Copy("", version) for name, version in files.items()}
        copies |= {name: copy for name, copy in before.items() if name in files and copy.version == files[name]}
        if copies == self._copies.get(entry):
            return copies
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as folder:
            kept = {name: Path(folder, name) for name, copy in copies.items() if not copy.url and not copy.version[2]}
            try:
                for name, path in kept.items():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(self._folder / name, path)
            except FileNotFoundError:
                return None
            versions = {name: _version(path, self._folder) for name, path in kept.items()}
            if self._scan().get(entry) != files:
                return None
            for name, path in sorted(kept.items()):
                free = unused(self._taken | self._own_names(self._fresh.values()))
                self._storage.put(path, f"{OBJECTS}/{free}")
                if _version(path, self._folder) != versions[name]:  # it was written to in place
                    return None
                copies[name] = self._fresh[name] = Copy(f"{self._storage.url}/{OBJECTS}/{free}", files[name])
        return copies if self._scan().get(entry, {}).items() <= files.items() else None

    def _move_manifest(self, copies: dict[str, dict[str, Copy]], step: int) -> None:
        """Write a new manifest of these copies to the storage, then to this machine, in place of the manifests before.

        Names of objects that the new manifest does not need may then be used again for other uploads.

        Args:
            copies: all copies that the manifest names, by entry and relative path.
            step: the script's newest step, which is written, too.

        Raises:
            OSError: the storage fails. Which manifest the storage has is then unknown, so no name may be used again.
        """
        assert self._storage is not None
        named = {name: copy for files in copies.values() for name, copy in files.items()}
        objects = {name: copy.url for name, copy in named.items() if copy.url}
        versions = {name: copy.version for name, copy in named.items()}
        self._taken |= self._own_names(named.values())
        with replacing(self._manifest) as beside:
            told = {"step": step, "figures": {**self.figures}}
            write_manifest(beside, {"folder": OBJECTS, "files": [], "objects": objects, "versions": versions, **told})
            self._storage.put(beside, self._manifest.name)
        self._copies = copies
        self._fresh = {name: copy for name, copy in self._fresh.items() if named.get(name) != copy}
        self._taken = self._own_names(named.values())

    def _own_names(self, copies: Iterable[Copy]) -> set[str]:
        """Return the names of the objects in this attempt's own folder of the storage."""
        own = f"{self._storage.url}/{OBJECTS}/" if self._storage else ""
        return {copy.url.removeprefix(own) for copy in copies if own and copy.url.startswith(own)}

    def _scan(self) -> Entries:
        """Return the version of each file and link in the folder of checkpoints.

        The outer dict is by entry: the file or folder at the top. The inner one is by path relative to the folder of
        checkpoints. A version is the time of change in nanoseconds, the size, and the target of a link.
        """
        found: Entries = {}
        for parent, folders, names in os.walk(self._folder):
            for path in (Path(parent, name) for name in (*folders, *names)):
                if version := _version(path, self._folder):
                    name = path.relative_to(self._folder).as_posix()
                    found.setdefault(_entry(name), {})[name] = version
        return found


def _version(path: Path, folder: Path) -> Version | None:
    """Return the version of a file or link: its time of change in nanoseconds, its size, and the target of a link.

    A file has the target "", and a link the size 0. The target of a link that stays in the folder is relative, because
    the next pod may have the folder elsewhere.

    Args:
        path: the file or link.
        folder: the folder of checkpoints.

    Returns:
        The version; None for anything else, such as a folder or a socket, and for what has just been removed.
    """
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return status.st_mtime_ns, status.st_size, ""
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            whole = os.path.normpath(path.parent / target)
            is_inside = whole.startswith(f"{folder}/")
            return status.st_mtime_ns, 0, os.path.relpath(whole, path.parent) if is_inside else target
    return None


def _entry(name: str) -> str:
    return name.partition("/")[0]
