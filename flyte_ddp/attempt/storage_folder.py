"""Copies of this machine's files in the platform's storage: uploads, their thread, downloads, and further tries."""

import contextvars
import errno
import math
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.errors import RecoverableError
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say
from flyte_ddp.whole_files import replacing

WAITS = (2.0, 10.0, 60.0)  # seconds before each further try; the storage's client retries several times by itself
Value = TypeVar("Value")


class StorageFolder:
    """A folder of the platform's storage that has copies of this machine's files.

    Attributes:
        url: the folder in the storage: a URL, or a path of this machine.
        folder: the folder on this machine whose files have the same names, unless a call says otherwise.
    """

    def __init__(self, platform: Platform, url: str, folder: Path = Path()):
        self.url = url
        self.folder = folder
        self._platform = platform

    def put(self, file: Path, name: str = "") -> None:
        """Upload a file, and replace what the storage has under the same name.

        Args:
            file: the file on this machine.
            name: the file's name in the storage, below the URL. If empty, the file must be in the folder, and has the
                same name below the URL as below the folder.

        Raises:
            OSError: The upload fails. The message has the storage's own error.
        """
        try:
            self._platform.put(file, f"{self.url}/{name or file.relative_to(self.folder).as_posix()}")
        except Exception as error:  # each storage has errors of its own
            raise OSError(errno.EIO, describe(error)) from None

    def put_text(self, text: str, name: str) -> None:
        """Upload a text as a file of that name. Raises OSError."""
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            self.put(Path(file.name), name)

    def fetch(self, name: str, file: Path | None = None) -> None:
        """Download a file, and create its folder on this machine if that is missing.

        The file appears whole or not at all. It replaces an earlier one.

        Args:
            name: the file's name in the storage, below the URL.
            file: the new file on this machine. None means the same name below `folder`.

        Raises:
            FileNotFoundError: The storage has no such file.
            Exception: The storage fails in another way.
        """
        file = file or self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as beside:
            self._platform.get(f"{self.url}/{name}", beside)

    def fetch_text(self, name: str) -> str:
        """Download a file, and return its text, which is empty if there is no such file."""
        with tempfile.TemporaryDirectory() as folder, suppress(FileNotFoundError):
            file = Path(folder, "text")
            self.fetch(name, file)
            return file.read_text(encoding="utf-8", errors="replace")
        return ""


def describe(error: BaseException) -> str:
    """Return an error's type and message, on one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def retry_storage(problem: str, call: Callable[[], Value]) -> Value:
    """Call a function that reads the storage until it succeeds, at most four times, and return its result.

    The further calls come after 2, 10 and 60 s. Each error before a further call is printed.

    Args:
        problem: begins the message of the RecoverableError.
        call: the function.

    Raises:
        FileNotFoundError: `call` raised it; there is no further call.
        RecoverableError: The last call failed, too. The message has the last error.
    """
    for seconds in (*WAITS, None):
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # each storage has errors of its own
            reason = describe(error)
        if seconds is not None:
            say(f"The checkpoint cannot be read yet, next try in {seconds:g} s: {reason}")
            time.sleep(seconds)
    raise RecoverableError(f"{problem}: {reason}: check access")


class UploadThread:
    """A thread that uploads while the task goes on.

    As a daemon, the thread does not keep the process from ending.
    """

    def __init__(self, upload: Callable[[bool], None], seconds: float | None = None):
        """Start the thread.

        Args:
            upload: uploads what has changed, and must not raise. It gets whether this is the last call.
            seconds: the time between two calls. With None, there is a call after each wake() only.
        """
        self._upload = upload
        self._seconds = seconds
        self._is_woken = threading.Event()
        self._is_closing = False
        # Only in this thread's context does the platform know its storage
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._work,), daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._is_woken.set()

    def close(self, until: float = math.inf) -> bool:
        """Have the thread call `upload` once more, as the last call, and wait until the thread ends.

        It waits no longer than `until`, on the clock of time.monotonic(). Returns whether the thread has ended; if not,
        it is still uploading.
        """
        self._is_closing = True
        self._is_woken.set()
        self._thread.join(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._is_woken.wait(self._seconds)
            self._is_woken.clear()
            is_last = self._is_closing
            self._upload(is_last)
