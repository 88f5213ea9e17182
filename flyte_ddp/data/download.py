"""Fetches original files from a list of mirrors: a dead network answers in seconds, nothing half-written stays."""

import hashlib
import os
import queue
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Generator, Optional, Sequence, Tuple

import requests
import urllib3.exceptions

from flyte_ddp.errors import DownloadError, InputError
from flyte_ddp.storage import synced_file, temporary_beside, writing_to

MIRROR_VARIABLE = "DDP_DATA_MIRROR"
STORAGES = ("s3", "gs", "abfs", "abfss")  # that Flyte's tasks read; the storage's own settings and keys are theirs
SCHEMES = ", ".join(("http", "https", "file", *STORAGES))
REMEDIES = (
    f"set {MIRROR_VARIABLE} to the URL ({SCHEMES}) of a folder with the original files, or train on the dataset "
    '"digits", which needs no network'
)

Progress = Callable[[str, int, Optional[int]], None]
OpenStored = Callable[[str], BinaryIO]  # opens a file of a storage by its URL
Pieces = Generator[bytes, None, None]


@dataclass(frozen=True)
class Limits:
    """How long nothing may come, never how long a download may take.

    Attributes:
        connect_seconds: for one network address; a host can have several.
        answer_seconds: from the request to the answer's first line, name look-up and redirects included.
        window_seconds, window_bytes: this many bytes must arrive in each window; the default is 1 KiB/s.
        silence_seconds: of all of a Mirrors' failed waits together.
        max_bytes: of one file; the largest original here, CIFAR-10, has 170 MB.
    """

    connect_seconds: float = 4.0
    answer_seconds: float = 8.0
    window_seconds: float = 6.0
    window_bytes: int = 6 * 1024
    silence_seconds: float = 26.0
    max_bytes: int = 256 * 2**20


@dataclass
class Mirrors:
    """The folders to ask, in this order, and what became known about their hosts while asking.

    Attributes:
        urls: of folders.
        progress: is told (file name, bytes so far, bytes in all or None); a next mirror starts at 0 again.
        open_stored: for URLs of storages, of which this module knows nothing; the limits are not for these.
    """

    urls: Sequence[str]
    progress: Optional[Progress] = None
    limits: Limits = Limits()
    open_stored: Optional[OpenStored] = None
    unreachable: Dict[str, str] = field(default_factory=dict)
    waited_seconds: float = 0.0

    def fetch(self, filename: str, md5: str, directory: Path) -> Path:
        """Returns the file in the directory, fetched unless it is there with this MD5; it appears whole or not at all.

        DownloadError lists why each mirror failed; InputError if the directory cannot be written to.
        """
        target = Path(directory) / filename
        if target.is_file() and _file_md5(target) == md5:
            return target
        reasons: Dict[str, str] = {}
        for folder in self.urls:
            url, host = f"{folder.rstrip('/')}/{filename}", _host(folder)
            if host in self.unreachable:
                reasons[host] = self.unreachable[host]
                continue
            try:
                self._copy(url, filename, md5, target)
                return target
            except _Unreachable as error:
                self.unreachable[host] = reasons[host] = str(error)
            except _Refused as error:
                reasons[_shown(url)] = str(error)
        lines = "".join(f"  {place}: {reason}\n" for place, reason in reasons.items())
        raise DownloadError(f"no mirror delivered {filename}:\n{lines}{REMEDIES}")

    def _copy(self, url: str, filename: str, md5: str, target: Path) -> None:
        pieces, total = self._open(url)
        digest, done, start = hashlib.md5(usedforsecurity=False), 0, b""
        with writing_to(target.parent, "DDP_DATA_DIR"):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_beside(target)
            try:
                with synced_file(temporary) as file:
                    for piece in pieces:
                        start = start or piece[:256]
                        done += len(piece)
                        if max(done, total or 0) > self.limits.max_bytes:
                            raise _Refused(f"larger than {self.limits.max_bytes:,} bytes")
                        digest.update(piece)
                        file.write(piece)
                        if self.progress:
                            self.progress(filename, done, total)
                if digest.hexdigest() != md5:
                    page = start.lstrip().lower().startswith((b"<!doctype", b"<html"))
                    what = "a web page instead of the file" if page else "another file, or a damaged one (MD5 differs)"
                    raise _Refused(f"sent {what}")
                os.replace(temporary, target)
            finally:
                pieces.close()
                temporary.unlink(missing_ok=True)

    def _open(self, url: str) -> Tuple[Pieces, Optional[int]]:
        if url.startswith("file:"):
            return _open_file(url)
        if not url.startswith("http"):
            return self._open_stored(url)
        response = self._answer(url)
        if response.status_code != 200:
            response.close()
            raise _Refused(f"HTTP status {response.status_code} {response.reason or ''}".strip())
        length = response.headers.get("Content-Length", "")
        return self._pieces(response), int(length) if length.isdecimal() else None

    def _open_stored(self, url: str) -> Tuple[Pieces, Optional[int]]:
        if self.open_stored is None:
            raise _Refused("only Flyte's tasks read from there")
        try:
            file = self.open_stored(url)
        except FileNotFoundError:
            raise _Refused("no such file") from None
        except Exception as error:  # each storage has its own
            raise _Unreachable(_on_one_line(error)) from None

        def pieces() -> Pieces:
            try:
                with file:
                    while piece := file.read(2**20):
                        yield piece
            except Exception as error:
                raise _Refused(f"cut midway: {_on_one_line(error)}") from None

        return pieces(), getattr(file, "size", None)

    def _answer(self, url: str) -> requests.Response:
        """Asks in a thread of its own: the name look-up, several addresses, redirects and headers that drip in would
        each outlast the time-outs that requests knows."""
        outcome: queue.SimpleQueue[requests.Response | Exception] = queue.SimpleQueue()
        limits = self.limits
        seconds = min(limits.answer_seconds, limits.silence_seconds - self.waited_seconds)
        if seconds < 0.1:
            raise _Unreachable(f"not asked, after {self.waited_seconds:.0f} s without data from others")

        def ask() -> None:
            try:
                timeouts = (limits.connect_seconds, limits.window_seconds)
                # identity: a .gz must arrive as it is stored
                outcome.put(requests.get(url, stream=True, timeout=timeouts, headers={"Accept-Encoding": "identity"}))
            except Exception as error:
                outcome.put(error)

        started = time.monotonic()
        threading.Thread(target=ask, daemon=True).start()
        try:
            answer = outcome.get(timeout=seconds)
        except queue.Empty:
            answer = TimeoutError()
        if isinstance(answer, requests.Response):
            return answer
        self.waited_seconds += time.monotonic() - started
        if isinstance(answer, requests.TooManyRedirects):
            raise _Refused("redirects in a circle")
        raise _Unreachable(_network_reason(answer))

    def _pieces(self, response: requests.Response) -> Pieces:
        """The body as it is sent, never decoded; each window must bring its bytes."""
        window_start, window_bytes = time.monotonic(), 0
        try:
            while piece := response.raw.read1(2**16, decode_content=False):
                yield piece
                window_bytes += len(piece)
                seconds = time.monotonic() - window_start
                if seconds > self.limits.window_seconds:
                    if window_bytes < self.limits.window_bytes:
                        self.waited_seconds += seconds
                        raise _Unreachable(f"too slow: {window_bytes} bytes in {seconds:.0f} s")
                    window_start, window_bytes = time.monotonic(), 0
        except urllib3.exceptions.ReadTimeoutError:
            self.waited_seconds += self.limits.window_seconds
            raise _Unreachable(f"fell silent midway for {self.limits.window_seconds:g} s") from None
        except (urllib3.exceptions.HTTPError, OSError):
            raise _Refused("connection cut midway") from None
        finally:
            response.close()


def mirror_from_environment() -> Optional[str]:
    """DDP_DATA_MIRROR, or None where it is not set; InputError if it is not the URL of a folder."""
    url = os.environ.get(MIRROR_VARIABLE, "").strip()
    if not url:
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        known = (parts.scheme == "file" and parts.netloc in ("", "localhost")) or (
            parts.scheme in ("http", "https", *STORAGES) and bool(parts.hostname)
        )
        folder = known and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:
        folder = False
    if not folder:
        hint = f": write file://{url}" if url.startswith("/") else ""
        shown = re.split("[?#]", _shown(url))[0]
        raise InputError(f"{MIRROR_VARIABLE} must be the URL of a folder ({SCHEMES}), got {shown!r}{hint}")
    return url


class _Refused(Exception):
    """This mirror will not deliver this file; the message is the reason, on one line."""


class _Unreachable(_Refused):
    """This mirror's host is not worth asking again."""


def _open_file(url: str) -> Tuple[Pieces, int]:
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
    if not path.is_file():
        raise _Refused("no such file" if path.parent.is_dir() else "no such folder")

    def pieces() -> Pieces:
        try:
            with open(path, "rb") as file:
                while piece := file.read(2**16):
                    yield piece
        except OSError as error:
            raise _Refused(str(error.strerror).lower()) from None

    return pieces(), path.stat().st_size


def _network_reason(error: Optional[BaseException]) -> str:
    """The system's own words at the bottom of what requests and urllib3 have wrapped."""
    if isinstance(error, (TimeoutError, requests.Timeout)):
        return "no answer in time"
    if isinstance(error, (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL)):
        return "leads to an address that is not http or https"
    where = "the proxy: " if isinstance(error, requests.exceptions.ProxyError) else ""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return f"{where}host name not found"
        if isinstance(error, OSError) and error.strerror:
            return f"{where}{error.strerror.lower()}"
        error = error.__cause__ or error.__context__
    return f"{where}connection closed without an answer"


def _on_one_line(error: Exception) -> str:
    return _shown(" ".join(f"{type(error).__name__}: {error}".split())[:200])


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return _shown(f"{parts.scheme}://{parts.netloc}")


def _shown(url: str) -> str:
    """The URL without what may be a password."""
    return re.sub("//.*@", "//***@", url)


def _file_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
