"""Checkpoint files: written whole or not at all, verified before anything in them is unpickled."""

import hashlib
import io
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError, InputError
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.storage import write_whole

FORMAT = 3
DIGEST_BYTES = hashlib.sha256().digest_size


def write_checkpoint(path: Path, content: Dict[str, Any]) -> None:
    """Writes a temporary file and renames it: path always holds the old or the new checkpoint. Raises OSError."""
    payload = _pack({"format": FORMAT, **content})
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
    content = _unpack(payload)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"has format {found}, this version reads {FORMAT}")
    if not all(isinstance(content.get(part), dict) for part in ("identity", "state")):
        raise CheckpointError("has no identity or no state")
    for key, expected in identity.items():
        found = content["identity"].get(key)
        if found != expected:
            raise CheckpointError(f"belongs to another training: its {key} was {found!r}, now it is {expected!r}")
    return content


def restore(state: TrainingState, saved: Dict[str, Any]) -> None:
    """Loads a checkpoint's state; raises CheckpointError if it does not fit, which leaves the state half loaded."""
    try:
        state.load_state_dict(saved)
    except (torch.AcceleratorError, torch.OutOfMemoryError):  # of this rank's device, not for what it was given
        raise
    except Exception as error:  # of many types, as the content may have any form
        told = " ".join(str(error).split())
        raise CheckpointError(f"does not fit this training: {type(error).__name__}: {told}") from None


def check_readable(state: TrainingState) -> None:
    """Raises InputError if a checkpoint of this state could not be read again, for the type of something in it."""
    _check_readable(pytree.tree_map_only(Tensor, lambda tensor: tensor.new_empty(0), state.content()), "")


def _check_readable(content: Any, where: str) -> None:
    try:
        _unpack(_pack(content))
    except Exception:  # of many types, and about the whole: the part to blame is found by trying each
        parts = content if isinstance(content, dict) else dict(enumerate(content if isinstance(content, list) else ()))
        for key, part in parts.items():
            _check_readable(part, f"{where}[{key!r}]")
        raise InputError(
            f"a checkpoint cannot hold state{where}, of type {type(content).__name__}, because it could not be read "
            "again: make it a number, a string, a tensor, or a list or dict of these"
        ) from None


def _pack(content: Any) -> memoryview:
    """Numbers of NumPy become plain ones: to read them as they are, torch would have to trust the file."""
    buffer = io.BytesIO()
    torch.save(pytree.tree_map_only(np.generic, np.generic.item, content), buffer)
    return buffer.getbuffer()


def _unpack(payload: Any) -> Any:
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, from pickle, zipfile and torch
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot be read: {type(error).__name__}: {first_line}") from None


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
