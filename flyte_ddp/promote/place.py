"""The place of promoted models: a folder, or a URL of the platform's storage.

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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from filelock import FileLock

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.platform_storage import files_at
from flyte_ddp.errors import InputError, RecoverableError, ReportedError
from flyte_ddp.whole_files import absolute, content_digest, whole_file, write_whole, writing_to

FORMAT = 1
# Errors of a disk that a retry would not mend
UNWRITABLE = (errno.EDQUOT, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EROFS)
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # errors of JSON that is not ours
NAME = re.compile(r"\w[\w.-]*")  # a version's name is no path out of the place
PROMOTED, ROLLED_BACK = "promoted", "rolled back"


@dataclass(frozen=True)
class Change:
    """A change of the promoted version: its name, the time (UTC), and whether it was promoted or rolled back to."""

    name: str
    time: str
    how: str


@dataclass(frozen=True)
class Pointer:
    """The content of current.json. The version is empty if nothing has been promoted yet."""

    version: str = ""
    history: tuple[Change, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> "Pointer":
        """Parse the content of current.json, and check that its version is the last one in its history.

        Raises:
            NewerFormatError: a newer program has written the content. This is a ValueError.
            ValueError, KeyError, TypeError, AttributeError, RecursionError: the content is damaged.
        """
        content = json.loads(text)
        check_format(content["format"])
        history = tuple(Change(**change) for change in content["history"])
        if content["version"] != (history[-1].name if history else ""):
            raise ValueError("its version is not the last one in its history")
        if history and not NAME.fullmatch(content["version"]):
            raise ValueError("its version is not the name of a folder")
        return cls(content["version"], history)

    def to(self, version: str, how: str) -> "Pointer":
        return Pointer(version, (*self.history, Change(version, now(), how)))


def local_root(place: str) -> str:
    """Return a URL as it is, and a folder as an absolute path. Raises InputError for a URL such as s3:/bucket."""
    if re.match(r"\w{2,}:/(?!/)", place):
        raise InputError(f"place must be a folder, or a URL such as s3://bucket/mnist, got {place!r}: add a slash")
    return place if "://" in place else str(absolute(place, "place"))


class Place:
    """A place of promoted models.

    In a folder, a lock makes simultaneous promotions take turns. Object storage has no lock; point() says what follows.
    """

    def __init__(self, platform: Platform, root: str):
        """Open the place. Raises InputError if root is neither an absolute path nor a URL."""
        self.root = root.removeprefix("file://").rstrip("/")
        self._in_storage = "://" in self.root
        if not self._in_storage and not os.path.isabs(self.root):
            raise InputError(f"place must be an absolute path or a URL of Flyte's storage (s3://…), got {root!r}")
        self._files, _ = files_at(platform, self.root)

    def read(self) -> Pointer:
        """Read current.json, and return the pointer: the promoted version and the history.

        Returns:
            The pointer. Its version is "" and its history empty if nothing has been promoted here yet.

        Raises:
            ReportedError: the file is damaged, or missing although there are versions. RecoverableError, which derives
                from this error, means that the storage fails.
            InputError: a newer program has written the file, or the place cannot be read.
        """
        problem = "is missing"
        for _ in range(2):  # another process may write current.json and a version between the two checks
            text = self._read("current.json")
            if text is None and not self.versions():
                return Pointer()
            if text is not None:
                try:
                    return Pointer.parse(text)
                except NewerFormatError as error:  # the history of a newer program beside this one must stay
                    raise InputError(
                        f"{self.root}/current.json must be of a format that this program knows: {error}: use the newer "
                        "one, or another place"
                    ) from None
                except UNREADABLE as error:
                    problem = f"is damaged ({type(error).__name__}: {error})"
        names = ", ".join(self.versions()) or "none"
        raise ReportedError(f"{self.root}/current.json {problem}: put it back, or roll back to a version: {names}")

    def begin(self) -> None:
        """Write an empty current.json before the first version, so that a lost file is noticed later."""
        with self._locked():
            if self._read("current.json") is None:
                self._write("current.json", encoded(asdict(Pointer())), mode="create")

    def versions(self) -> list[str]:
        """Return the names of all complete versions, oldest first."""
        with self._own_errors():
            self._files.invalidate_cache()
            # glob() would take a root such as models[1] for a pattern
            paths = self._files.find(f"{self.root}/versions")
        return sorted(str(path).split("/")[-2] for path in paths if str(path).endswith("/version.json"))

    def facts(self, version: str) -> dict[str, Any]:
        """Return the content of a version's version.json. It always has "sha256", the digest of the weights.

        Raises:
            ReportedError: the file is missing or unreadable, or of a newer format. RecoverableError, which derives from
                this error, means that the storage fails.
            InputError: the place cannot be read.
        """
        text = self._read(f"versions/{version}/version.json")
        if text is None:
            raise self._damaged(version, "has no version.json")
        try:
            facts: dict[str, Any] = json.loads(text)
            check_format(facts["format"])
            return {"sha256": facts["sha256"], **facts}
        except UNREADABLE as error:
            raise self._damaged(version, f"has an unreadable version.json ({error})") from None

    def fetch(self, version: str, into: Path) -> dict[str, Any]:
        """Copy a version's weights to a file, verify their SHA-256, and return the content of version.json.

        Args:
            version: the name of the version.
            into: the file, which is overwritten. If the digest is wrong, the wrong content stays there.

        Raises:
            ReportedError: version.json is missing or unreadable, or model.pt is missing or has changed.
                RecoverableError, which derives from this error, means that the storage fails.
            InputError: the place cannot be read, or the file cannot be written.
        """
        facts = self.facts(version)
        path = f"versions/{version}/model.pt"
        with self._own_errors():
            if not self._files.exists(f"{self.root}/{path}"):
                raise self._damaged(version, "has no model.pt")
        with writing_to(into.parent, "DDP_RUNS_DIR or TMPDIR"), open(into, "wb") as copy:
            copy.writelines(self._pieces(path))
        if content_digest(into) != facts["sha256"]:
            raise self._damaged(version, "has a different model.pt than was promoted")
        return facts

    def add(self, version: str, model: Path, facts: dict[str, Any]) -> None:
        """Copy a model into the place as a new version, without promoting it.

        version.json is written last, so versions() never lists an incomplete version. In a new place, an empty
        current.json is written first.

        Args:
            version: the name of the version. An existing version of the same name is overwritten.
            model: the file of weights to copy.
            facts: the content of version.json. "sha256", the digest of the weights, must be among them. "format" and
                "name" are added.

        Raises:
            InputError: the place cannot be written to.
            RecoverableError: the storage fails.
        """
        self.begin()
        path = f"versions/{version}/model.pt"
        with self._own_errors():
            if self._in_storage:
                self._files.put_file(str(model), f"{self.root}/{path}")
            else:
                with open(model, "rb") as source, whole_file(self._local(path)) as copy:
                    shutil.copyfileobj(source, copy)
        self._write(f"versions/{version}/version.json", encoded({"name": version, **facts}))

    def point(self, seen: Pointer, version: str, how: str) -> Pointer | None:
        """Promote a complete version, unless the pointer has changed since the caller read it.

        In a folder, a lock keeps other processes from writing meanwhile. In object storage, two promotions can both
        find the pointer unchanged. The last write then wins, and the history lacks the other promotion, whose version
        stays in the place.

        Args:
            seen: the pointer that the caller read.
            version: the version to promote.
            how: PROMOTED or ROLLED_BACK, for the history.

        Returns:
            The new pointer; None if the pointer had changed, and nothing was written.

        Raises:
            InputError: the place cannot be read or written, or a newer program has written current.json.
            ReportedError: current.json is damaged or missing. RecoverableError, which derives from this error, means
                that the storage fails.
        """
        with self._locked():
            if self.read() != seen:
                return None
            pointer = seen.to(version, how)
            self._write("current.json", encoded(asdict(pointer)))
            return pointer

    def roll_back(self, version: str) -> Pointer:
        """Promote an earlier version again, after verifying its weights, and return the new pointer.

        The roll-back is added to the history in current.json. A current.json that is damaged or missing is replaced by
        a new one, and the history before is lost.

        Args:
            version: the name of a version in this place.

        Raises:
            InputError: the place has no versions, or none of this name; it cannot be read or written; or a newer
                program has written its current.json.
            RecoverableError: the storage fails. This error is a ReportedError, too, so catch RecoverableError first.
            ReportedError: the version is damaged.
        """
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
            self._write("current.json", encoded(asdict(after)))
        return after

    def _damaged(self, version: str, problem: str) -> ReportedError:
        others = ", ".join(name for name in self.versions() if name != version) or "none"
        return ReportedError(
            f"version {version} in {self.root} {problem}: put it back, or roll back to another: {others}"
        )

    def _pieces(self, path: str) -> Iterator[bytes]:
        """Yield a file's content in pieces of 1 MiB."""
        with self._own_errors(), self._files.open(f"{self.root}/{path}", "rb") as source:
            yield from iter(partial(source.read, 2**20), b"")

    def _read(self, path: str) -> bytes | None:
        """Return a file's content; None if there is no such file."""
        with self._own_errors(), suppress(FileNotFoundError):
            content: bytes = self._files.cat_file(f"{self.root}/{path}")
            return content
        return None

    def _write(self, path: str, content: bytes, mode: str = "overwrite") -> None:
        with self._own_errors(), suppress(FileExistsError):
            if self._in_storage:  # writing an object is atomic
                self._files.pipe_file(f"{self.root}/{path}", content, mode=mode)
            else:
                write_whole(self._local(path), content)

    def _local(self, path: str) -> Path:
        final = Path(self.root, path)
        final.parent.mkdir(parents=True, exist_ok=True)
        return final

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock on the place against other processes while the block runs; a context manager.

        The call waits without a limit while another process has the lock. In object storage nothing is locked. Raises
        InputError or RecoverableError if the lock's file cannot be created.
        """
        if self._in_storage:
            yield
            return
        with self._own_errors():
            lock = FileLock(self._local(".lock")).acquire()
        with lock:
            yield

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Replace errors of storage and disk in the block by this library's errors; a context manager.

        An error that a retry would not mend, such as a missing permission or a full disk, becomes an InputError. A
        ClickException, such as this library's errors, passes unchanged. Any other exception becomes a RecoverableError.
        """
        try:
            yield
        except click.ClickException:
            raise
        except PermissionError as error:
            raise InputError(f"place {self.root} must be readable and writable here: {error}") from None
        except Exception as error:  # each storage has its own errors
            if getattr(error, "errno", None) in UNWRITABLE:
                raise InputError(f"place {self.root} must be writable: {error}") from None
            raise RecoverableError(f"place {self.root} cannot be used: {type(error).__name__}: {error}") from None


def encoded(content: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, **content}, indent=2).encode()


class NewerFormatError(ValueError):
    pass


def check_format(number: int) -> None:
    if number > FORMAT:
        raise NewerFormatError(f"format {number} is newer than this program, which knows {FORMAT}")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def version_name(digest: str) -> str:
    """Return a name from the time and the start of the hash: 20261122-030412-1f2e3d4c."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{digest[:8]}"
