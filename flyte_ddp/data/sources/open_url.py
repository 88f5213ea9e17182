"""URLs (http, https, file and object storage) as pieces of bytes. A dead network is given up in seconds."""

import queue
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import requests
import urllib3.exceptions

from flyte_ddp.text import masked

OpenStored = Callable[[str], BinaryIO]  # opens a file in object storage by its URL
Pieces = Generator[bytes, None, None]


@dataclass(frozen=True)
class Limits:
    """Limits on how long no data may come. A download itself may take any time.

    Attributes:
        connect_seconds: for one network address; a host can have several.
        answer_seconds: from the request to the first line of the answer, including name look-up and redirects.
        window_seconds, window_bytes: so many bytes must arrive in each window; the default is 1 KiB/s.
        silence_seconds: for all failed waits of an Opener together.
        max_bytes: for one file; the largest original file here, CIFAR-10, has 170 MB.
    """

    connect_seconds: float = 4.0
    answer_seconds: float = 8.0
    window_seconds: float = 6.0
    window_bytes: int = 6 * 1024
    silence_seconds: float = 26.0
    max_bytes: int = 256 * 2**20


class RefusedError(Exception):
    """A URL that cannot be read. The message is the reason, on one line."""


class UnreachableError(RefusedError):
    """A URL whose host is not worth asking again."""


@dataclass
class Opener:
    """An opener of URLs, which adds up how long it has waited in vain.

    Attributes:
        limits: when to give up.
        open_stored: opens URLs of object storage, which this module knows nothing about; the limits don't apply to
            them.
        waited_seconds: how long no data came, so far.
    """

    limits: Limits = Limits()
    open_stored: OpenStored | None = None
    waited_seconds: float = 0.0

    def open(self, url: str) -> tuple[Pieces, int | None]:
        """Open a URL of http, https, file or object storage.

        The connection or file stays open until all pieces are read, or the generator of pieces is closed. Reading a
        piece may raise the errors below, too.

        Returns:
            The content, piece by piece, and its size in bytes, which is None if it is unknown.

        Raises:
            UnreachableError: The host is not worth asking again for other URLs. This is a subclass of RefusedError, so
                catch it first.
            RefusedError: The URL cannot be read.
        """
        if url.startswith("file:"):
            return _open_file(url)
        if not url.startswith("http"):
            return self._open_stored(url)
        response = self._answer(url)
        if response.status_code != 200:
            response.close()
            raise RefusedError(f"HTTP status {response.status_code} {response.reason or ''}".strip())
        length = response.headers.get("Content-Length", "")
        return self._pieces(response), int(length) if length.isdecimal() else None

    def _open_stored(self, url: str) -> tuple[Pieces, int | None]:
        if self.open_stored is None:
            raise RefusedError("only Flyte's tasks read from there")
        try:
            file = self.open_stored(url)
        except FileNotFoundError:
            raise RefusedError("no such file") from None
        except Exception as error:  # each storage has errors of its own
            raise UnreachableError(_on_one_line(error)) from None
        return _read(file), getattr(file, "size", None)

    def _answer(self, url: str) -> requests.Response:
        """Send a GET request, and return the answer, of any status, once its headers have come.

        The answer must come within limits.answer_seconds, and before waited_seconds would exceed
        limits.silence_seconds. The time of a failed request is added to waited_seconds.

        Raises:
            UnreachableError: The request has failed, has no answer in time, or is not sent because less than 0.1 s is
                left. This is a subclass of RefusedError.
            RefusedError: The redirects never end.
        """
        outcome: queue.SimpleQueue[requests.Response | Exception] = queue.SimpleQueue()
        limits = self.limits
        seconds = min(limits.answer_seconds, limits.silence_seconds - self.waited_seconds)
        if seconds < 0.1:
            raise UnreachableError(f"not asked, after {self.waited_seconds:.0f} s without data from others")

        def ask() -> None:
            try:
                timeouts = (limits.connect_seconds, limits.window_seconds)
                # The encoding "identity" makes a .gz file arrive as it is stored
                outcome.put(requests.get(url, stream=True, timeout=timeouts, headers={"Accept-Encoding": "identity"}))
            except Exception as error:
                outcome.put(error)

        started = time.monotonic()
        # Name look-up, redirects and slow headers can take longer than the time-outs of `requests`
        threading.Thread(target=ask, daemon=True).start()
        try:
            answer = outcome.get(timeout=seconds)
        except queue.Empty:
            answer = TimeoutError()
        if isinstance(answer, requests.Response):
            return answer
        self.waited_seconds += time.monotonic() - started
        if isinstance(answer, requests.TooManyRedirects):
            raise RefusedError("redirects in a circle")
        raise UnreachableError(_network_reason(answer))

    def _pieces(self, response: requests.Response) -> Pieces:
        """Yield the body as it is sent, without decoding, and close the response at the end.

        Raises:
            UnreachableError: No byte has come for limits.window_seconds, or fewer than limits.window_bytes within that
                time. The time is added to waited_seconds.
            RefusedError: The connection was cut.
        """
        window_start = time.monotonic()
        window_bytes = 0
        try:
            while piece := response.raw.read1(2**16, decode_content=False):
                given = time.monotonic()
                yield piece
                window_start += time.monotonic() - given  # the caller's time is none of the server's
                window_bytes += len(piece)
                seconds = time.monotonic() - window_start
                if seconds > self.limits.window_seconds:
                    if window_bytes < self.limits.window_bytes:
                        self.waited_seconds += seconds
                        raise UnreachableError(f"too slow: {window_bytes} bytes in {seconds:.0f} s")
                    window_start = time.monotonic()
                    window_bytes = 0
        except urllib3.exceptions.ReadTimeoutError:
            self.waited_seconds += self.limits.window_seconds
            raise UnreachableError(f"fell silent midway for {self.limits.window_seconds:g} s") from None
        except (urllib3.exceptions.HTTPError, OSError):
            raise RefusedError("connection cut midway") from None
        finally:
            response.close()


def _open_file(url: str) -> tuple[Pieces, int]:
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
    try:
        return _read(open(path, "rb")), path.stat().st_size
    except OSError as error:
        raise RefusedError(str(error.strerror).lower() if path.parent.is_dir() else "no such folder") from None


def _read(file: BinaryIO) -> Pieces:
    try:
        with file:
            while piece := file.read(2**20):
                yield piece
    except Exception as error:
        raise RefusedError(f"cut midway: {_on_one_line(error)}") from None


def _network_reason(error: BaseException | None) -> str:
    """Return in a few words why a request failed: the system's own message, which requests wraps in its exceptions."""
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
    return masked(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
