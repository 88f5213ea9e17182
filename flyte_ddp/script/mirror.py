"""The mirror of a script's checkpoints in the platform's storage, of which an attempt never finds half a checkpoint."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flyte_ddp.attempt.best_models import unused
from flyte_ddp.attempt.checkpoints import CheckpointStore
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.storage_folder import StorageFolder, UploadThread, patiently
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, Event
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.launch.grace import GRACE_VARIABLE
from flyte_ddp.manifest import read_manifest, write_manifest
from flyte_ddp.report.console import say, warn
from flyte_ddp.text import explain_error
from flyte_ddp.whole_files import files_below

QUIET_SECONDS = 5.0  # a file or folder that nobody has changed for so long is taken for complete
OBJECTS = "files"  # the folder in the storage whose objects the manifest names
Version = tuple[int, int]  # a file's time of change in nanoseconds, and its size
Entries = dict[str, dict[str, Version]]  # the files below each file or folder at the top, by their relative paths


@dataclass(frozen=True)
class Copy:
    """A file's copy in the storage, and the version of the local file that it is a copy of."""

    url: str
    version: Version


class CheckpointMirror:
    """A folder's copy in the storage: objects under names of their own, and a manifest, which is replaced last.

    Whatever lies directly in the folder, a file or a folder with all that is in it, is taken as one entry: it is
    uploaded once it has been quiet, and until then the manifest names its copy from before. A name is used again only
    once the manifest in the storage does without it. A recipe's sharded checkpoints have such a manifest, too, and so
    the next attempt finds it in the same way.

    Attributes:
        step: the newest step that the script has told of.
        has_ended: whether all ranks have come to their own end, so that all entries are complete.
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
        self.has_ended = False
        self._now = now
        self._platform = platform
        self._folder = folder
        self._manifest = manifest
        self._storage = storage
        self._copies: dict[str, Copy] = {}  # what the manifest names, by relative path
        self._taken: set[str] = set()  # names of objects that the manifest in the storage may name
        self._entries: Entries = {}
        self._changed: dict[str, float] = {}  # when each entry was last seen to be another, by the clock
        self._emit: Callable[[Event], None] = lambda event: None

    def restore(self) -> None:
        """Make the folder what the manifest names, and nothing else; without a manifest it stays as it is.

        Raises:
            InputError: the manifest is not that of a script, which resume_from may name.
            RecoverableError: the storage does not deliver a file.
        """
        is_own = self._storage is None and any(self._folder.iterdir())  # an earlier local run has left it
        if is_own or not self._manifest.exists():
            return
        try:
            found = read_manifest(self._manifest) or {}
            urls = {str(name): str(url) for name, url in found["objects"].items()}
            self.step = int(found["step"])
            if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in urls):
                raise ValueError
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(
                "RunOptions.resume_from must be the checkpoint folder of a script's execution, got one of another "
                "training: leave it out, or give the folder that the script's log names after Checkpoints"
            ) from None
        for name, version in self._scan().items():
            if name not in urls or Copy(urls[name], version) != self._copies.get(name):
                (self._folder / name).unlink()
        for name, url in urls.items():
            path = self._folder / name
            if not path.exists():
                there, _, file = url.rpartition("/")
                folder = StorageFolder(self._platform, there)
                try:
                    patiently(f"cannot read {url}", lambda: folder.fetch(file, path))  # noqa: B023 called at once
                except FileNotFoundError:
                    raise InputError(f"the checkpoint's file {url} has been removed: start anew, without it") from None
            self._copies[name] = Copy(url, _version(path))
        self._taken = self._own_names(self._copies)
        self._entries = _by_entry(self._scan())
        if urls:
            say(f"Files of the script's checkpoints that were restored: {len(urls)}")

    @contextmanager
    def following(self, emit: Callable[[Event], None], has_ended: Callable[[], bool]) -> Iterator[None]:
        """Upload what is quiet while the block runs, and at its end, also that of an error, once more.

        Args:
            emit: gets a CheckpointWritten when the manifest has moved, from a thread of its own.
            has_ended: returns, after the block, whether all ranks have come to their own end.

        Raises:
            PreemptedError: The block raised it. If the last upload took longer than the grace, the message says so.
        """
        if self._storage is None:
            yield
            return
        self._emit = emit
        self.has_ended = False
        thread = UploadThread(self._upload, QUIET_SECONDS)
        try:
            yield
        except PreemptedError as stopped:
            self.has_ended = has_ended()
            if thread.close(stopped.until):
                raise
            raise PreemptedError(
                f"{stopped}; its files were not all uploaded within the grace, so a resume begins with those before: "
                f"if the platform gives longer, say so by {GRACE_VARIABLE}"
            ) from None
        except BaseException:
            self.has_ended = has_ended()
            thread.close()
            raise
        else:
            self.has_ended = has_ended()
            thread.close()

    def _upload(self, is_last: bool) -> None:
        try:
            self.upload_quiet(is_last and self.has_ended)
        except Exception as error:  # the next round may succeed
            warn(f"checkpoints of the script were not uploaded: {explain_error(error)}")

    def upload_quiet(self, take_all: bool = False) -> None:
        """Upload the entries that are quiet, or all, and then the manifest if it names others than before.

        An entry that is gone stays in the manifest until it has been gone for a while, and all others are quiet or one
        has been uploaded: a script may remove its last checkpoint before the next one is complete.

        Raises:
            OSError: The folder cannot be read, or the storage fails.
        """
        now = self._now()
        started = time.time()
        step = self.step
        entries = _by_entry(self._scan())
        known = {*entries, *self._entries, *map(_entry, self._copies)}
        self._changed |= {one: now for one in known if entries.get(one) != self._entries.get(one)}
        self._entries = entries
        quiet = {one for one in known if take_all or now - self._changed.get(one, -math.inf) >= QUIET_SECONDS}
        copies = dict(self._copies)
        has_news = False
        for entry in sorted(quiet & {*entries}):
            copied = self._put_entry(entries[entry])
            before = {name: copy for name, copy in copies.items() if _entry(name) == entry}
            if copied is not None and copied != before:
                copies = {name: copy for name, copy in copies.items() if name not in before} | copied
                has_news = True
        if entries and (has_news or {*entries} <= quiet):
            gone = quiet - {*entries}
            copies = {name: copy for name, copy in copies.items() if _entry(name) not in gone}
        if copies != self._copies:
            self._move_manifest(copies, step)
            self._emit(CheckpointWritten(0, step, str(self._folder), 0.0, time.time() - started))

    def _put_entry(self, files: Mapping[str, Version]) -> dict[str, Copy] | None:
        """Upload the files of an entry that the storage lacks.

        Returns:
            The copies of all of its files, by relative path; None if the entry has changed meanwhile.
        """
        assert self._storage is not None
        copies = {}
        for name, version in files.items():
            copy = self._copies.get(name)
            if copy is None or copy.version != version:
                path = self._folder / name
                if not path.exists():
                    return None
                free = unused(self._taken)
                self._taken.add(free)
                self._storage.put(path, f"{OBJECTS}/{free}")
                copy = Copy(f"{self._storage.url}/{OBJECTS}/{free}", version)
            copies[name] = copy
        return copies if {name: self._scan().get(name) for name in files} == files else None

    def _move_manifest(self, copies: dict[str, Copy], step: int) -> None:
        """Replace the manifest, here and in the storage. The names that it no longer needs are free from then on.

        Raises:
            OSError: The storage fails. It is unknown then which manifest it has, so no name is free.
        """
        assert self._storage is not None
        objects = {name: copy.url for name, copy in copies.items()}
        write_manifest(self._manifest, {"folder": OBJECTS, "files": [], "objects": objects, "step": step})
        self._storage.put_manifest(self._manifest)
        self._copies = copies
        self._taken = self._own_names(copies)

    def _own_names(self, copies: Mapping[str, Copy]) -> set[str]:
        """Return the names of the objects in this attempt's own folder of the storage."""
        own = f"{self._storage.url}/{OBJECTS}/" if self._storage else ""
        return {copy.url.removeprefix(own) for copy in copies.values() if own and copy.url.startswith(own)}

    def _scan(self) -> dict[str, Version]:
        """Return the version of each file below the folder, by its path relative to the folder."""
        found = {}
        for path in files_below(self._folder):
            with suppress(FileNotFoundError):  # it may have been removed just now, or be a link that leads nowhere
                found[path.relative_to(self._folder).as_posix()] = _version(path)
        return found


def _version(path: Path) -> Version:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _entry(name: str) -> str:
    return name.partition("/")[0]


def _by_entry(files: Mapping[str, Version]) -> Entries:
    entries: Entries = {}
    for name, version in files.items():
        entries.setdefault(_entry(name), {})[name] = version
    return entries
