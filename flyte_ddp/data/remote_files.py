"""Files in Flyte's storages (s3://, gs://, abfs://) or on disk, which ranks read by fsspec, without flytekit.

Each request has a time limit and is tried again a few times. So a storage that refuses, hangs or trickles ends in a
message that names the file, before the launcher takes the rank for hung (RunOptions.timeout_seconds).
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from flyte_ddp.data.description import StoredData
from flyte_ddp.data.fsspec_compat import own_client
from flyte_ddp.errors import DataError, DownloadError, InputError
from flyte_ddp.whole_files import files_below, write_whole, writing_to

INDEX = "index.json"  # the name of the index of a folder of blocks
STAMPS = ("ETag", "etag", "mtime", "created")  # storages' names for the details that change when a file is written
PIECE_BYTES = 2**23
TRIES = 4
PIECE_SECONDS = 30.0  # the time limit for one try of a piece
PAUSE_SECONDS = 1.0  # the pause after the first try; each further pause is twice as long

T = TypeVar("T")


def use_storage_options(options: dict[str, dict[str, Any]]) -> None:
    """Make fsspec open each protocol with these options in this process, as flytekit would."""
    for protocol, values in options.items():
        fsspec.config.conf.setdefault(protocol, {}).update(values)


Details = dict[str, Any]


def find_files(files: AbstractFileSystem, root: str) -> dict[str, Details]:
    """Return the details, such as the size, of all files below a root, by each file's name below the root, sorted.

    If the root is itself a file, its name is "". If nothing is there, the dict is empty. Left out are hidden files,
    files in hidden folders, and the empty objects that some tools write for a folder. On a disk, links are followed.

    Args:
        files: fsspec's client of the storage.
        root: the path of a folder or file, in the client's form.

    Raises:
        InputError: On a disk, a link that is not hidden leads nowhere, or any link leads to a folder that contains it.
        OSError: On a disk, a folder cannot be listed. A storage's client has errors of its own.
    """
    if isinstance(files, LocalFileSystem):
        entries = _find_on_disk(root)
    else:
        files.invalidate_cache()
        objects = files.find(root, detail=True).items()
        folders = ("directory", "other")
        entries = {
            path[len(root) + 1 :]: details
            for path, details in objects
            if not path.endswith("/") and details.get("type") not in folders
        }
    return {name: entries[name] for name in sorted(entries) if not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    """Return whether a file, or a folder in which it is, has a name that begins with a dot."""
    return any(part[:1] == "." for part in name.split("/"))


def _find_on_disk(root: str) -> dict[str, Details]:
    if not os.path.isdir(root):
        return {"": _details(os.stat(root))} if os.path.isfile(root) else {}
    files: dict[str, Details] = {}
    for path in files_below(root):
        with suppress(FileNotFoundError):  # the file may have been removed in the meantime
            if path.is_file():
                files[path.relative_to(root).as_posix()] = _details(path.stat())
            elif path.is_symlink() and not _is_hidden(
                path.relative_to(root).as_posix()
            ):  # data that are still to be fetched may be such links
                target = os.readlink(path)
                raise InputError(f"{path} leads to {target}, which is not there: put it there, or remove the link")
    return files


def _details(status: os.stat_result) -> Details:
    return {"size": status.st_size, "mtime": status.st_mtime, "created": status.st_ctime}


def describe_version(details: Details) -> str:
    """Return a text that changes when a file is written to, from its details: its size, and its ETag or times."""
    stamps = [details[key] for key in STAMPS if details.get(key)]
    return f"{details['size']} {' '.join(map(str, stamps))}" if stamps else str(details)


class Stored:
    """The files below a URL, or the single file that the URL names."""

    def __init__(self, url: str | Path, options: dict[str, Any] | None = None):
        """Connect to the storage.

        Args:
            url: the URL or path of a folder or file.
            options: options for fsspec's client, in addition to those of use_storage_options.
        """
        self.url = str(url).rstrip("/")
        self.files, self.root = own_client(self.url, options)

    def name(self, file: str) -> str:
        """Return a file's name for messages."""
        return f"{self.url}/{file}" if file else self.url

    def details(self) -> dict[str, Details]:
        """Return the client's details of each file, as find_files() does."""
        return self._retry("", lambda: find_files(self.files, self.root))

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by its name below the URL.

        Files and folders whose names begin with an underscore, which other tools leave, are left out.
        """
        sizes = {name: details["size"] for name, details in self.details().items()}
        return {name: size for name, size in sizes.items() if not any(part[:1] == "_" for part in name.split("/"))}

    def write(self, file: str, content: bytes) -> None:
        """Write a file below the URL whole or not at all, in place of an earlier one.

        On a disk, missing folders are created. Raises InputError if the file cannot be written; nothing is tried again.
        """
        with writing_to(self.url, "folder"):
            # Object storages have no folders, and s3fs would try to create the bucket
            if isinstance(self.files, LocalFileSystem):
                path = Path(self.root, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
            else:
                self.files.pipe_file(f"{self.root}/{file}", content)

    def read(self, file: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return some or all bytes of a file below the URL, after up to TRIES tries with growing pauses.

        Args:
            file: the file's name below the URL; "" if the URL is the file.
            start: the position of the first byte, from 0; None for the file's beginning.
            stop: the position after the last byte; None for the file's end.

        Raises:
            DataError: The file is not there, or may not be read.
            DownloadError: All tries have failed. A try fails, too, if it gets fewer or more bytes than asked for.
        """

        def ask() -> bytes:
            path = f"{self.root}/{file}" if file else self.root
            limit = {"timeout": PIECE_SECONDS} if self.files.async_impl else {}  # the client of a disk takes no limit
            content: bytes = self.files.cat_file(path, start=start, end=stop, **limit)
            if start is not None and stop is not None and len(content) != stop - start:
                had = f"{len(content):,} bytes instead of {stop - start:,}"
                raise OSError(f"{had}, as if it were cut short: write it again if it stays so")
            return content

        return self._retry(file, ask)

    def pieces(self, file: str, size: int, digest: Any) -> Iterator[bytes]:
        """Yield the content of a file piece by piece, and add each piece to the digest, which is hashlib's."""
        for start in range(0, size, PIECE_BYTES):
            piece = self.read(file, start, min(start + PIECE_BYTES, size))
            digest.update(piece)
            yield piece

    def _retry(self, file: str, ask: Callable[[], T]) -> T:
        """Call ask() up to TRIES times, with growing pauses, until it succeeds, and return its result.

        Args:
            file: the name of the file below the URL, for messages.
            ask: reads the storage.

        Raises:
            InputError: ask() raised it; there is no further try.
            DataError: ask() raised FileNotFoundError or PermissionError; there is no further try.
            DownloadError: All tries have failed, by whatever other errors.
        """
        reason = ""
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE_SECONDS * 2 ** (number - 1))
            try:
                return ask()
            except InputError:
                raise
            except FileNotFoundError:
                raise DataError(f"{self.name(file)} is not there", "put it back, or correct the URL") from None
            except PermissionError as error:
                raise DataError(f"{self.name(file)} may not be read: {error}", "allow it") from None
            except Exception as error:  # each storage has errors of its own
                reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadError(f"{self.name(file)} could not be read, tried {TRIES} times: {reason}")


def stored_data(url: str, options: dict[str, dict[str, Any]] | None = None) -> StoredData:
    """Return a reference to data in a storage: URL, options, and a digest that changes when the files change.

    The digest is computed from the files' names, sizes and times, without reading the files. In a folder of blocks, the
    content of the index counts instead.

    Args:
        url: a folder with files, or a file.
        options: the options of fsspec's clients, by protocol. They stay set in this process. With None, fsspec takes
            its options from its own configuration and the environment.

    Raises:
        InputError: There are no data, or the URL names no storage that can be read here.
        DataError: The data, or an index, may not be read.
        DownloadError: The storage fails.
    """
    use_storage_options(options or {})
    stored = Stored(url)
    details = stored.details()
    if not details:
        raise InputError(f"data must be a folder with files, or a file, got {url}")
    # The index of blocks has their digests
    indexes = {name: stored.read(name) for name in details if PurePosixPath(name).name == INDEX}
    indexed = {PurePosixPath(name).parent for name, content in indexes.items() if _is_of_blocks(content)}
    seen: list[Any] = []
    for name, one in details.items():
        if name in indexes:
            seen.append((name, hashlib.sha256(indexes[name]).hexdigest()))
        elif PurePosixPath(name).parent not in indexed:
            seen.append((name, describe_version(one)))
    return StoredData(url, hashlib.sha256(json.dumps(seen).encode()).hexdigest(), options or {})


def _is_of_blocks(index: bytes) -> bool:
    """Return whether the content of an index.json is this library's. Other libraries have files of the same name."""
    try:
        content = json.loads(index)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "blocks" in content


class StoredFile(io.RawIOBase):
    """A file for libraries that read at any position, such as pyarrow."""

    def __init__(self, stored: Stored, file: str, size: int):
        self.stored = stored
        self.file = file
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read from the position until the buffer is full or the file ends, and move the position.

        Returns the number of bytes; 0 at the file's end.

        Raises:
            DataError: The file is not there, or may not be read.
            DownloadError: The storage still fails after several tries.
        """
        begin = self.position  # pyarrow treats a shorter read as an error, so there are as many requests as it takes
        stop = min(begin + len(buffer), self.size)
        for start in range(begin, stop, PIECE_BYTES):
            end = min(start + PIECE_BYTES, stop)
            buffer[start - begin : end - begin] = self.stored.read(self.file, start, end)
            self.position = end
        return self.position - begin


class PiecesFile(io.RawIOBase):
    """Pieces of bytes as a file that is read from beginning to end, such as by tarfile."""

    def __init__(self, pieces: Iterator[bytes]):
        self.pieces = pieces
        self.rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.rest = self.rest or next(self.pieces, b"")
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count
