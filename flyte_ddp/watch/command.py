"""The command `python -m flyte_ddp watch PLACE`, which shows a training in this terminal, as if it ran here."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import click
import fsspec

from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.report.console import is_shown, open_console, say
from flyte_ddp.report.goodput import format_seconds
from flyte_ddp.report.progress import FILE, FORMAT, TimesRead, parse_event
from flyte_ddp.report.record import RunFailed
from flyte_ddp.text import encodable, without_controls

POLL_SECONDS = 1.0


class File:
    """A growing file, local or in Flyte's storage."""

    def __init__(self, place: str):
        """Find the file.

        Args:
            place: the file, the folder of a training's logs, or the folder that contains it.
        """
        folder = place.rstrip("/")
        paths = [place] if place.endswith(".jsonl") else [f"{folder}/{FILE}", f"{folder}/logs/{FILE}"]
        self.path = paths[0]
        self._seen = False
        self._number: int | None = None  # the file's inode; an object storage has none
        if "://" in place:
            from flytekit import FlyteContextManager  # this import takes seconds, and a local file does not need it

            access = FlyteContextManager.current_context().file_access  # with Flyte's settings for the storage
            try:
                self._storage: Any = access.get_filesystem_for_path(place)
            except Exception as error:  # fsspec knows no such storage, or its client needs something else
                raise unreadable(place, error) from None
        else:
            self._storage = fsspec.filesystem("file")
        with suppress(Exception):  # read_on() reports what is wrong with the storage
            self.path = next(path for path in paths if self._storage.exists(path))

    def exists(self) -> bool:
        try:
            return bool(self._storage.exists(self.path))
        except Exception as error:  # each storage has its own errors
            raise unreadable(self.path, error) from None

    def read_on(self, start: int) -> bytes:
        """Return what has been written after the first `start` bytes; b"" if nothing has.

        Raises:
            InputError: the file cannot be read at the first call.
            ReportedError: the file could be read earlier, but no longer, or another run has begun it anew.
        """
        try:
            self._storage.invalidate_cache()
            info = self._storage.info(self.path)
            size = int(info["size"])
            number = info.get("ino")
            content: bytes = self._storage.cat_file(self.path, start=start, end=size) if size > start else b""
        except Exception as error:  # each storage has its own errors
            if self._seen:
                kind = type(error).__name__
                raise ReportedError(
                    f"{self.path} can no longer be read ({kind}): a local run that fails leaves nothing behind"
                ) from None
            raise unreadable(self.path, error) from None
        if size < start or (self._seen and number != self._number):
            raise ReportedError(f"{self.path} has been restarted by another run: watch it again")
        self._seen = True
        self._number = number
        return content


def unreadable(place: str, error: Exception) -> InputError:
    return InputError(f"{place} cannot be read ({type(error).__name__}): give the place of a training's logs")


@click.command()
@click.argument("place")
@click.option("--timeout", type=click.FloatRange(min=0), help="Give up after this many seconds without anything new.")
def watch(place: str, timeout: float | None) -> None:
    """Show the training whose logs are at PLACE until it ends.

    PLACE is a path, or a URL of Flyte's storage: what a run prints after "Logs:", its output `logs`, the folder that
    contains these, or their progress.jsonl.

    At the end, or after Ctrl-C, the command prints how ranks and hosts have spent their seconds so far, and how all
    attempts at the training together have spent theirs.

    The exit status is 0 if the training has succeeded, 2 if PLACE cannot be read, and 1 if the training has failed or
    can no longer be followed, as when nothing new has come for --timeout seconds.
    """
    file = File(place)
    times = TimesRead()
    console = open_console()
    try:
        last = show(file, console, timeout, times.read)
    finally:
        console.say_ranks()
        console.close()
        if times.goodput:
            say(f"Seconds: {format_seconds(times.goodput.seconds)}")
    if isinstance(last, RunFailed):
        raise ReportedError(f"The training failed: {last.reason}")
    say(f"The training has finished, after {last:.1f} s")


def show(
    file: File, console: Any, timeout: float | None, read: Callable[[dict[str, Any]], None] = lambda line: None
) -> RunFailed | float:
    """Pass each event of a training to the console, and each parsed line to `read`, until the training ends.

    Args:
        file: the progress file, which is followed while it grows.
        console: takes the events.
        timeout: give up after this many seconds without new content; None waits for ever.
        read: takes every line as a dict.

    Returns:
        A RunFailed with the reason if the training has failed, else how many seconds it took.

    Raises:
        InputError: the file cannot be read at first.
        ReportedError: nothing new has come for `timeout` seconds; the file can no longer be read, is no progress file,
            is of a newer format, or was begun anew; or the terminal can no longer be written to.
    """
    for text in follow_lines(file, timeout):
        try:
            line = printable(json.loads(text, parse_constant=finite, parse_float=finite))
            read(line)
            if line["event"] == "failed":
                return RunFailed(str(line["reason"]))
            if line["event"] == "finished":
                return float(line["total_seconds"])
            if line.get("format", FORMAT) > FORMAT:
                raise ReportedError(
                    f"{file.path} has format {line['format']}, but this program knows {FORMAT}: update it"
                )
            if event := parse_event(line):
                console(event)
                if not is_shown():
                    raise ReportedError("What the training says cannot be written")
        except ReportedError:
            raise
        except Exception:  # a line may be anything
            raise ReportedError(f"{file.path} is not the progress of a training: {text[:100]!r}") from None
    raise ReportedError(f"{file.path} has nothing new for {timeout:g} s: the training may have been killed")


def finite(text: str) -> float:
    """Return the number. Raises ValueError for NaN and infinities, which no training writes."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def printable(value: Any) -> Any:
    """Return parsed JSON without the control characters of its texts: anyone may have written the file."""
    if isinstance(value, dict):
        return {printable(name): printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [printable(one) for one in value]
    return without_controls(encodable(value)) if isinstance(value, str) else value


def follow_lines(file: File, timeout: float | None) -> Iterator[bytes]:
    """Yield each whole line of a growing file as it comes, without its newline.

    Args:
        file: the file, which is read from its start, then about once a second.
        timeout: return after this many seconds without new content; None never returns.

    Raises:
        InputError: the file cannot be read at first.
        ReportedError: the file can no longer be read, or another run has begun it anew.
    """
    read = 0
    begun = b""
    heard = time.monotonic()
    while True:
        if news := file.read_on(read):
            *whole, begun = (begun + news).split(b"\n")
            read = read + len(news)
            heard = time.monotonic()
            yield from whole
        if timeout is not None and time.monotonic() - heard >= timeout:
            return
        time.sleep(POLL_SECONDS)
