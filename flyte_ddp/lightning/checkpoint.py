"""Checkpoints of a training under Lightning, in files like our own: written whole, verified when read."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from flyte_ddp.engine.checkpoint import check_readable, read_checkpoint, refuse, write_checkpoint
from flyte_ddp.errors import CheckpointError
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.settings import RunOptions

# What __init__ was given: it is given again, and may be of any type
UNNEEDED = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")


class CheckpointFiles(CheckpointIO):
    """Saves and loads the checkpoints of Lightning's Trainer.

    Attributes:
        position: epoch and step, from 0, that training goes on with; whoever saves sets it.
    """

    def __init__(self, identity: Mapping[str, Any], emit: Callable[[Event], None]):
        """identity: all that determines the result."""
        self._identity, self._emit, self._is_readable = dict(identity), emit, False
        self.position = 0, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        started = time.monotonic()
        state = {name: value for name, value in checkpoint.items() if name not in UNNEEDED}
        if not self._is_readable:
            check_readable(state)
            self._is_readable = True
        try:
            write_checkpoint(Path(path), {"identity": self._identity, "state": state})
        except OSError as error:  # training need not fail because a disk does
            self._emit(CheckpointFailed(f"{path}: {error.strerror}"))
        else:
            seconds = time.monotonic() - started
            self._emit(CheckpointWritten(*self.position, str(path), stall_seconds=seconds, write_seconds=0.0))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        content: dict[str, Any] = read_checkpoint(Path(path), self._identity)["state"]
        return content

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)

    def usable(self, path: Path, options: RunOptions) -> Path | None:
        """The path, if there is a checkpoint of this training; all ranks of a host get the same answer."""
        try:
            return path if path.exists() and read_checkpoint(path, self._identity) else None
        except CheckpointError as error:
            refuse(error, options, self._emit)
            return None
