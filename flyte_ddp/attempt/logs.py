"""Uploads of a run's logs to the platform's storage while the run lasts: nothing else remains of a lost pod."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from click import ClickException

from flyte_ddp.attempt.failures import attempt_error, format_urls, to_failure
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.storage_folder import StorageFolder, UploadThread
from flyte_ddp.events import Observer, Printed
from flyte_ddp.launch.failures import describe_error
from flyte_ddp.launch.output import capture_lines
from flyte_ddp.report.console import say, warn
from flyte_ddp.text import explain_error

UPLOAD_SECONDS = 5.0  # time between two rounds of uploads; a round takes 17 ms of CPU time for three files
BYTES_PER_SECOND = 4e6  # the limit per file: storage cannot append, so a file that has grown is uploaded as a whole
CLOSE_SECONDS = 10.0  # how long the end of a run waits for the last round: a pod has 30 s to stop


@dataclass(frozen=True)
class Logs(Observer):
    """A run's folder of logs.

    Attributes:
        folder: the folder on this machine.
        url: the folder in the platform's storage; empty for a local run.
    """

    folder: Path
    url: str

    def on_printed(self, event: Printed) -> None:
        """Write what each rank prints to a file of its own."""
        append(self.folder / f"rank-{event.rank}.log", event.text)


@contextmanager
def kept_logs(platform: Platform, run: Path, name: str = "console", prefix: str = "") -> Iterator[Logs]:
    """Create the folder `logs` in a run's folder, and on a cluster upload its files during the block.

    A context manager. In a local run, nothing else happens. On a cluster, the file NAME.log gets all that this process
    prints, and the error that ends the block. The run's report.html is uploaded, too. A changed file is uploaded within
    ten seconds, or later if it has more than 40 MB. The end of the block waits for the last uploads, at most
    CLOSE_SECONDS. An error of this library becomes the platform's error, whose message has the URL of the logs.

    Args:
        platform: the platform.
        run: the run's folder, which has no `logs` yet.
        name: the name of the log without ".log".
        prefix: begins each line of this process in the pod's own output, on a cluster.

    Yields:
        The folder, and its URL in the storage, which is empty in a local run.
    """
    folder = run / "logs"
    folder.mkdir(parents=True)
    if platform.is_local():
        yield Logs(folder, url="")
        return
    logs = Logs(folder, platform.logs_url())
    earlier = platform.previous_logs_url()
    uploads = Uploads(platform, run, logs.url.rpartition("/")[0])
    try:
        with copied_output(folder / f"{name}.log", prefix):
            say(f"Logs: {logs.url}{earlier and f'; those of the previous attempt: {earlier}'}")
            yield logs
    except BaseException as error:
        append(folder / f"{name}.log", f"{type(error).__name__}: {describe_error(error)}")
        if isinstance(error, ClickException):
            raise attempt_error(platform, to_failure(platform, error), format_urls(platform)) from None
        raise
    finally:
        uploads.thread.close(time.monotonic() + CLOSE_SECONDS)


class Uploads(StorageFolder):
    """The uploads of a run's logs and report to the platform's storage, whenever they have changed.

    Failed uploads are tried again in the next round.
    """

    def __init__(self, platform: Platform, run: Path, url: str):
        super().__init__(platform, url, run)
        self._sent: dict[Path, tuple[int, int]] = {}  # each file's time of change and size, as of its last upload
        self._due: dict[Path, float] = {}  # when each file may be uploaded again, on the clock of time.monotonic()
        self._is_failing = False
        self.thread = UploadThread(self._upload, UPLOAD_SECONDS)

    def _upload(self, is_last: bool) -> None:
        if is_last:
            self._due.clear()
        problem = ""
        # Small files come first: the ranks' output must not wait for a profile
        for _, file in sorted(self._files()):
            try:
                self._send(file)
            except Exception as error:  # a single file may not be readable
                problem = problem or explain_error(error)
        if problem and not self._is_failing:
            warn(f"the logs are not in {self.url} yet: {problem}")
        self._is_failing = bool(problem)

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield size in bytes and path of each file to upload: the run's report.html and all below its folder logs.

        Skips hidden files, which are half-written; files that are gone; and links that lead nowhere or in a circle.
        """
        files = [*self.folder.glob("report.html")]
        for folder, _, names in os.walk(self.folder / "logs"):
            files += (Path(folder, name) for name in names if not name.startswith("."))  # hidden files are half-written
        for file in files:
            with suppress(OSError):
                yield file.stat().st_size, file

    def _send(self, file: Path) -> None:
        copy = self.folder / ".upload"
        try:
            status = file.stat()
            state = (status.st_mtime_ns, status.st_size)
            if state == self._sent.get(file) or time.monotonic() < self._due.get(file, 0.0):
                return
            shutil.copyfile(file, copy)  # the storage's client fails if a file grows during the upload
        except FileNotFoundError:  # the file may have been removed in the meantime
            return
        self.put(copy, file.relative_to(self.folder).as_posix())
        self._sent[file] = state
        self._due[file] = time.monotonic() + state[1] / BYTES_PER_SECOND


@contextmanager
def copied_output(path: Path, prefix: str) -> Iterator[None]:
    """Copy each line that the block prints to a file, with the time before it.

    A context manager. The lines still go to standard output or error, and there `prefix` begins each of them. Lines are
    appended to the file at `path`, which is created if it is missing. Lines that cannot be written there are lost,
    without an error.
    """

    def copying(stream: "Callable[[str], int]") -> Callable[[str], None]:
        def hand_on(line: str) -> None:
            stream(f"{prefix}{line}\n")
            append(path, line)

        return hand_on

    with capture_lines(copying(sys.stdout.write), copying(sys.stderr.write)):
        yield


def append(path: Path, text: str) -> None:
    """Append lines, each with the time before it. On a full disk these lines are lost, but the run continues."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{now} {line}\n" for line in text.splitlines() or [""])
