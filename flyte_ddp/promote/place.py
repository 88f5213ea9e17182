"""Where promoted models are kept: a folder, or a URL of Flyte's storage.

PLACE/current.json                 the promoted version, and all promotions so far, oldest first
PLACE/versions/NAME/model.pt       its weights
PLACE/versions/NAME/version.json   metadata and measures; written last, so a version without it is incomplete

Reading current.json, and then the version that it names, gives a complete model at any time.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from filelock import FileLock
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from flyte_ddp.errors import InputError, RecoverableError, ReportedError
from flyte_ddp.storage import content_digest, synced_file, temporary_beside, write_whole

FORMAT = 1
UNWRITABLE = (errno.EDQUOT, errno.ENOSPC, errno.ENOTDIR, errno.EROFS)  # of a disk; a retry would not help
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of JSON that is not ours
NAME = re.compile(r"\w[\w.-]*")  # of a version: no path out of the place
PROMOTED, ROLLED_BACK = "promoted", "rolled back"


@dataclass(frozen=True)
class Event:
    """A change of the promoted version: its name, when (UTC), and whether it was promoted or rolled back to."""

    name: str
    time: str
    how: str


@dataclass(frozen=True)
class Pointer:
    """The content of current.json; version is empty if nothing has been promoted yet."""

    version: str = ""
    history: tuple[Event, ...] = ()

    def to(self, version: str, how: str) -> "Pointer":
        return Pointer(version, (*self.history, Event(version, now(), how)))


class Place:
    """A place of promoted models.

    In a folder, a lock makes simultaneous promotions take turns. Object storage has no lock: see point.
    """

    def __init__(self, root: str):
        """Raises InputError if root is neither an absolute path nor a URL."""
        self.root = root.removeprefix("file://").rstrip("/")
        self._in_storage = FileAccessProvider.is_remote(self.root)
        if not self._in_storage and not os.path.isabs(self.root):
            raise InputError(f"place must be an absolute path or a URL of Flyte's storage (s3://…), got {root!r}")
        self._files = FlyteContextManager.current_context().file_access.get_filesystem_for_path(self.root)

    def read(self) -> Pointer:
        """Raises ReportedError if current.json is damaged, or missing although there are versions."""
        problem = "is missing"
        for _ in range(2):  # another process may write both between the two looks
            try:
                return self._parsed(self._read("current.json"))
            except FileNotFoundError:
                if not self.versions():
                    return Pointer()
            except InputError:  # a ValueError, too
                raise
            except UNREADABLE as error:
                problem = f"is damaged ({type(error).__name__}: {error})"
        names = ", ".join(self.versions()) or "none"
        raise ReportedError(f"{self.root}/current.json {problem}: put it back, or roll back to a version: {names}")

    def begin(self) -> None:
        """Writes an empty current.json before the first version, so that a lost one is noticed later."""
        with self._locked():
            try:
                self._read("current.json")
            except FileNotFoundError:
                self._write("current.json", _as_json(Pointer()), exclusive=True)

    def versions(self) -> list[str]:
        """Names of all complete versions, oldest first."""
        with self._own_errors():
            self._files.invalidate_cache()
            found = self._files.find(f"{self.root}/versions")  # for a glob, a root such as models[1] is a pattern
        return sorted(str(path).split("/")[-2] for path in found if str(path).endswith("/version.json"))

    def facts(self, version: str) -> dict[str, Any]:
        """The content of version.json; raises ReportedError if it is missing or unreadable."""
        try:
            facts: dict[str, Any] = json.loads(self._read(f"versions/{version}/version.json"))
            check_format(facts["format"])
            return {"sha256": facts["sha256"], **facts}
        except FileNotFoundError:
            raise self._damaged(version, "has no version.json") from None
        except InputError:
            raise
        except UNREADABLE as error:
            raise self._damaged(version, f"has an unreadable version.json ({error})") from None

    def fetch(self, version: str, into: Path) -> dict[str, Any]:
        """Copies a version's weights to a file, and returns its facts; ReportedError if the weights have changed."""
        facts = self.facts(version)
        try:
            with (
                self._own_errors(reading=True),
                self._files.open(f"{self.root}/versions/{version}/model.pt", "rb") as source,
                open(into, "wb") as copy,
            ):
                shutil.copyfileobj(source, copy)
        except FileNotFoundError:
            raise self._damaged(version, "has no model.pt") from None
        if content_digest(into) != facts["sha256"]:
            raise self._damaged(version, "has a different model.pt than was promoted")
        return facts

    def add(self, version: str, model: Path, facts: dict[str, Any]) -> None:
        """Writes a complete version, without promoting it."""
        self.begin()
        content = {"format": FORMAT, "name": version, **facts}
        with self._own_errors():
            self._copy(model, f"versions/{version}/model.pt")
        self._write(f"versions/{version}/version.json", content)

    def point(self, seen: Pointer, version: str, how: str) -> bool:
        """Promotes a version atomically; returns False, without a change, if the pointer is no longer `seen`.

        In a folder this is exact. In object storage, if two promotions write after both have read, the last write wins,
        and the other is missing from the history; its version stays.
        """
        with self._locked():
            if self.read() != seen:
                return False
            self._write("current.json", _as_json(seen.to(version, how)))
            return True

    def roll_back(self, version: str) -> Pointer:
        """Promotes an earlier version again; replaces a current.json that is damaged or missing."""
        versions = self.versions()
        if not versions:
            raise InputError(f"place {self.root} must have a version to roll back to, but has none: promote one first")
        if version not in versions:
            raise InputError(f"name must be one of {', '.join(versions)}, got {version!r}")
        with TemporaryDirectory() as folder:
            self.fetch(version, Path(folder, "model.pt"))  # verifies the weights
        with self._locked():
            try:
                before = self.read()
            except RecoverableError:
                raise
            except ReportedError:
                before = Pointer()
            after = before.to(version, ROLLED_BACK)
            self._write("current.json", _as_json(after))
        return after

    def _parsed(self, content: bytes) -> Pointer:
        parsed = json.loads(content)
        check_format(parsed["format"])
        history = tuple(Event(**event) for event in parsed["history"])
        if parsed["version"] != (history[-1].name if history else ""):
            raise ValueError("its version is not the last one in its history")
        if history and not NAME.fullmatch(parsed["version"]):
            raise ValueError("its version is not the name of a folder")
        return Pointer(parsed["version"], history)

    def _damaged(self, version: str, problem: str) -> ReportedError:
        others = ", ".join(name for name in self.versions() if name != version) or "none"
        return ReportedError(
            f"version {version} in {self.root} {problem}: put it back, or roll back to another: {others}"
        )

    def _read(self, path: str) -> bytes:
        with self._own_errors(reading=True):
            content: bytes = self._files.cat_file(f"{self.root}/{path}")
            return content

    def _write(self, path: str, content: dict[str, Any], exclusive: bool = False) -> None:
        text = json.dumps(content, indent=2).encode()
        with self._own_errors(), suppress(FileExistsError):
            if self._in_storage:  # a single put, which is atomic
                self._files.pipe_file(f"{self.root}/{path}", text, mode="create" if exclusive else "overwrite")
            else:
                write_whole(self._local(path), text)

    def _copy(self, model: Path, path: str) -> None:
        if self._in_storage:
            self._files.put_file(str(model), f"{self.root}/{path}")
            return
        final = self._local(path)
        beside = temporary_beside(final)
        with open(model, "rb") as source, synced_file(beside) as copy:
            shutil.copyfileobj(source, copy)
        os.replace(beside, final)

    def _local(self, path: str) -> Path:
        final = Path(self.root, path)
        final.parent.mkdir(parents=True, exist_ok=True)
        return final

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """While the block runs, no other process changes the pointer of a folder."""
        if self._in_storage:
            yield
            return
        with self._own_errors():
            lock = FileLock(self._local(".lock"))
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _own_errors(self, reading: bool = False) -> Iterator[None]:
        """Turns errors of storage and disk into ours; with reading, FileNotFoundError is passed on."""
        try:
            yield
        except click.ClickException:
            raise
        except FileNotFoundError as error:
            if reading:
                raise
            raise InputError(f"place {self.root} must be writable: {error}") from None
        except PermissionError as error:
            raise InputError(f"place {self.root} must be readable and writable here: {error}") from None
        except Exception as error:  # each storage has its own errors
            if getattr(error, "errno", None) in UNWRITABLE:
                raise InputError(f"place {self.root} must be writable: {error}") from None
            raise RecoverableError(f"place {self.root} cannot be used: {type(error).__name__}: {error}") from None


def _as_json(pointer: Pointer) -> dict[str, Any]:
    history = [asdict(event) for event in pointer.history]
    return {"format": FORMAT, "version": pointer.version, "history": history}


def check_format(number: int) -> None:
    if number > FORMAT:
        raise ValueError(f"format {number} is newer than this program, which knows {FORMAT}")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def version_name(digest: str) -> str:
    """The time and the start of the hash: 20261122-030412-1f2e3d4c."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{digest[:8]}"
