"""What a run writes for people, sent to Flyte's storage while it lasts: a pod that is lost leaves nothing else."""

import contextvars
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, Tuple, Union

import click
from flytekit import FlyteContextManager, current_context
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.events import Event, Printed
from flyte_ddp.launch.rank import PrintedLines
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say
from flyte_ddp.tasks.execution import is_local, told
from flyte_ddp.tasks.flytekit_compat import checkpoint_source

UPLOAD_SECONDS = 5.0  # between two rounds of uploads, each of which takes 17 ms of a processor for three files
BYTES_PER_SECOND = 4e6  # at most, for each file: storage cannot append, so a file that has grown is sent as a whole
CLOSE_SECONDS = 10.0  # the end of a run waits this long for the last round: a pod that is told to stop has 30 in all


@dataclass(frozen=True)
class Logs:
    """A run's folder for people.

    Attributes:
        folder: here.
        place: in Flyte's storage, as remote_directory of a FlyteDirectory; False for a local run.
    """

    folder: Path
    place: Union[str, bool]

    @property
    def output(self) -> FlyteDirectory:
        return FlyteDirectory(str(self.folder), remote_directory=self.place)

    def on_event(self, event: Event) -> None:
        """Keeps what a rank prints in a file of its own."""
        if isinstance(event, Printed):
            append(self.folder / f"rank-{event.rank}.log", event.text)


@contextmanager
def kept_logs(run: Path, name: str = "console", prefix: str = "") -> Iterator[Logs]:
    """The folder `logs` in that of a run, which on a cluster is in Flyte's storage too while the block runs.

    So is the report beside it. NAME.log has all that this process prints, which the pod's output has with the prefix,
    and the error that ends the block; the error tells where that is. Files come after at most ten seconds, above 40 MB
    later: see BYTES_PER_SECOND.
    """
    folder = run / "logs"
    folder.mkdir(parents=True)
    if is_local():
        yield Logs(folder, place=False)
        return
    logs = Logs(folder, place=place_of_logs())
    uploads = Uploads(run, place_of_logs().rpartition("/")[0])
    try:
        with copied_output(folder / f"{name}.log", prefix):
            say(f"Logs: {logs.place}{_earlier_attempt()}")
            yield logs
    except BaseException as error:
        append(folder / f"{name}.log", f"{type(error).__name__}: {error}")
        if isinstance(error, click.ClickException):
            raise told(error, place_of_logs()) from None
        raise
    finally:
        uploads.close()


class Uploads:
    """Sends the files of a run's logs, and its report, to a place in Flyte's storage whenever they have changed.

    A thread does it. What it cannot send it tries again in the next round.
    """

    def __init__(self, run: Path, place: str):
        self._run, self._place = run, place
        self._sent: Dict[Path, Tuple[int, int]] = {}
        self._due: Dict[Path, float] = {}
        self._closing, self._failing = threading.Event(), False
        # the thread needs this one's Flyte context, which knows the storage
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._work,), name=f"logs of {run.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Waits for a last round, but not for ever: a daemon's thread keeps no process from ending."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while not self._closing.wait(UPLOAD_SECONDS):
            self._round()
        self._due.clear()
        self._round()

    def _round(self) -> None:
        try:
            # the small ones first: what the ranks have said is not to wait for a profile
            files = sorted((file.stat().st_size, file) for file in self._files())
            for _, file in files:
                self._send(file)
            self._failing = False
        except FileNotFoundError:
            pass  # somebody's temporary file has gone meanwhile
        except Exception as error:  # each storage has its own
            if not self._failing:
                say(f"Warning: the logs are not in {self._place} yet: {type(error).__name__}: {one_line(error)}")
            self._failing = True

    def _files(self) -> Iterator[Path]:
        yield from self._run.glob("report.html")
        for folder, _, names in os.walk(self._run / "logs"):
            yield from (Path(folder, name) for name in names if not name.startswith("."))  # .name is half-written

    def _send(self, file: Path) -> None:
        status = file.stat()
        state = (status.st_mtime_ns, status.st_size)
        if state == self._sent.get(file) or time.monotonic() < self._due.get(file, 0.0):
            return
        copy = self._run / ".upload"
        shutil.copyfile(file, copy)  # the storage's client takes it amiss when a file grows under its hands
        access = FlyteContextManager.current_context().file_access
        access.put_data(str(copy), f"{self._place}/{file.relative_to(self._run).as_posix()}")
        self._sent[file], self._due[file] = state, time.monotonic() + state[1] / BYTES_PER_SECOND


@contextmanager
def copied_output(path: Path, prefix: str) -> Iterator[None]:
    """Has what this process prints in a file as well, with the time of each line; see rank.PrintedLines."""

    def copying(stream: "Callable[[str], int]") -> Callable[[str], None]:
        def hand_on(line: str) -> None:
            stream(f"{prefix}{line}\n")
            append(path, line)

        return hand_on

    with (
        redirect_stdout(PrintedLines(copying(sys.stdout.write), sys.stdout)),
        redirect_stderr(PrintedLines(copying(sys.stderr.write), sys.stderr)),
    ):
        yield


def place_of_logs() -> str:
    """Of this attempt in Flyte's storage, the same for all of its pods."""
    return FlyteContextManager.current_context().file_access.raw_output_prefix.rstrip("/") + "/logs"


def append(path: Path, text: str) -> None:
    """Adds lines with the time before them; a disk that has no room for them costs these lines, not the run."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{now} {line}\n" for line in text.splitlines() or [""])


def _earlier_attempt() -> str:
    """Where the logs of the attempt before are: beside its checkpoint."""
    earlier = checkpoint_source(current_context().checkpoint)
    return f"; those of the attempt before: {earlier.rpartition('/')[0]}/logs" if earlier else ""
