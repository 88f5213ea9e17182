"""Where a training and its evaluator meet: a folder, or its URL in a storage, that both see.

PLACE/KEY/NAME.pt      the weights of an evaluation, from the training; NAME has its number and the weights' digest
PLACE/KEY/NAME.json    what they measure, from the evaluator
PLACE/KEY/training     changes while the training runs; evaluator: likewise
PLACE/KEY/ended        the training has ended

KEY is the training's. So whoever is started again finds what is known already, and nothing of another training.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from flyte_ddp.data.remote_files import Stored
from flyte_ddp.errors import DataError, DownloadError, InputError
from flyte_ddp.model_files.weights import save
from flyte_ddp.text import reason_of
from flyte_ddp.whole_files import whole_file

BEAT_SECONDS = 5.0
TRAINING, EVALUATOR, ENDED = "training", "evaluator", "ended"
FAILURES = (DataError, DownloadError, InputError, OSError)  # of a storage


class Mailbox:
    """Of the training's rank 0, or of each of the evaluator's. Its methods raise FAILURES."""

    def __init__(self, place: str, key: str, own: str, options: dict[str, dict[str, Any]] | None = None):
        """own: TRAINING or EVALUATOR. options: for fsspec, by protocol."""
        protocol = place.partition("://")[0]
        self._stored = Stored(f"{place.rstrip('/')}/{key}", (options or {}).get(protocol))
        self._own, self._other = own, TRAINING if own == EVALUATOR else EVALUATOR
        self._beat, self._heard = b"", time.monotonic()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While the block runs, the other one sees that this one does. InputError if the place cannot be written to."""
        stop = threading.Event()
        try:
            self._write_beat()
        except FAILURES as error:
            raise InputError(f"evaluate_elsewhere must be a place to write to: {error}") from None

        def beat() -> None:
            while not stop.wait(BEAT_SECONDS):
                with suppress(*FAILURES):  # the next one may arrive
                    self._write_beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def seconds_silent(self) -> float:
        """Since a beat of the other's, or since this began."""
        with suppress(DataError):  # none yet
            beat = self._stored.read(self._other)
            if beat != self._beat:
                self._beat, self._heard = beat, time.monotonic()
        return time.monotonic() - self._heard

    def files(self) -> list[str]:
        """All names, in the order of their evaluations; one request."""
        return [*self._stored.details()]

    def hand_over(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """To the evaluator, unless it has them, or has evaluated them already."""
        if {f"{name}.pt", f"{name}.json"} & {*self.files()}:
            return
        if isinstance(self._stored.files, LocalFileSystem):
            path = Path(self._path(name))
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                self._ask(save, dict(weights), file)
            return
        with TemporaryDirectory() as folder:
            with open(Path(folder, name), "xb") as file:
                self._ask(save, dict(weights), file)
            self._ask(self._stored.files.put_file, f"{folder}/{name}", self._path(name))

    def weights(self, name: str) -> dict[str, Tensor]:
        """What was handed over; what cannot be read is removed, so that the training hands it over again."""
        with TemporaryDirectory() as folder:
            self._ask(self._stored.files.get_file, self._path(name), f"{folder}/{name}")
            try:
                weights: dict[str, Tensor] = torch.load(Path(folder, name), weights_only=True)
            except Exception as error:  # torch has many for a damaged file
                self._remove(f"{name}.pt")
                raise DataError(f"{self._path(name)} could not be read: {reason_of(error)}") from None
        return weights

    def answer(self, name: str, found: dict[str, Any]) -> None:
        """found: values of JSON."""
        self._write(f"{name}.json", json.dumps(found).encode())

    def read_answer(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._stored.read(f"{name}.json"))
        except ValueError:
            raise DataError(f"{self._stored.name(f'{name}.json')} is damaged") from None
        return found

    def clear(self, name: str) -> None:
        """Removes weights and answer, if they are there."""
        for suffix in (".pt", ".json"):
            self._remove(f"{name}{suffix}")

    def end(self) -> None:
        self._write(ENDED, b"")

    def begin(self) -> None:
        self._remove(ENDED)

    def _path(self, name: str) -> str:
        return f"{self._stored.root}/{name}.pt"

    def _write_beat(self) -> None:
        self._write(self._own, str(time.time_ns()).encode())

    def _write(self, file: str, content: bytes) -> None:
        self._ask(self._stored.write, file, content)

    def _remove(self, file: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(self._stored.files.rm_file, f"{self._stored.root}/{file}")

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Each storage has errors of its own: here they are an OSError that names it."""
        try:
            call(*arguments)
        except (FileNotFoundError, DataError, DownloadError, InputError):
            raise
        except Exception as error:
            raise OSError(f"{self._stored.url}: {reason_of(error)}") from error
