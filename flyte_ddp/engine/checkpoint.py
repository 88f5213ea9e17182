"""Checkpoint files: written whole or not at all, verified before anything in them is unpickled."""

import hashlib
import io
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

import torch

from flyte_ddp.engine.state import TrainingState
from flyte_ddp.errors import CheckpointError
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.storage import write_whole

FORMAT = 3
DIGEST_BYTES = hashlib.sha256().digest_size


def write_checkpoint(path: Path, content: Dict[str, Any]) -> None:
    """Writes a temporary file and renames it: path always holds the old or the new checkpoint. Raises OSError."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    payload = buffer.getbuffer()
    write_whole(path, hashlib.sha256(payload).digest(), payload)


def read_checkpoint(path: Path, identity: Mapping[str, Any]) -> Dict[str, Any]:
    """The content of a checkpoint; raises CheckpointError if it is damaged or of a training with another identity."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from None
    digest, payload = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError("is damaged: its content does not match its checksum")
    content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"has format {content.get('format')}, this version reads {FORMAT}")
    for key, expected in identity.items():
        found = content["identity"].get(key)
        if found != expected:
            raise CheckpointError(f"belongs to another training: its {key} was {found!r}, now it is {expected!r}")
    return content


class CheckpointWriter:
    """Rank 0's checkpoints: the state is copied at once, and a thread writes the copy while training continues.

    A checkpoint that cannot be written is reported and skipped: training need not fail because a disk does.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], seconds: float, emit: Callable[[Event], None]):
        self._path, self._identity, self._seconds, self._emit = path, dict(identity), seconds, emit
        self._thread: Optional[threading.Thread] = None
        self._last = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._last >= self._seconds

    def save(self, state: TrainingState) -> None:
        started = time.monotonic()
        self.close()
        content = {"identity": self._identity, "state": state.state_dict()}
        self._last = time.monotonic()
        arguments = (content, state.epoch, state.step, self._last - started)
        self._thread = threading.Thread(target=self._write, args=arguments)
        self._thread.start()

    def close(self) -> None:
        """Waits until the current checkpoint is written."""
        if self._thread:
            self._thread.join()

    def _write(self, content: Dict[str, Any], epoch: int, step: int, stall_seconds: float) -> None:
        started = time.monotonic()
        try:
            write_checkpoint(self._path, content)
        except OSError as error:
            self._emit(CheckpointFailed(f"{self._path}: {error.strerror}"))
        else:
            seconds = time.monotonic() - started
            self._emit(CheckpointWritten(epoch, step, str(self._path), stall_seconds, seconds))


class NoCheckpoints:
    """Does nothing, for the other ranks: all ranks have the same state."""

    def due(self) -> bool:
        return False

    def save(self, state: TrainingState) -> None:
        pass

    def close(self) -> None:
        pass
