"""Checkpoints of a training under Lightning, in files like our own: written whole, verified when read."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.engine.checkpoint import read_checkpoint, write_checkpoint
from flyte_ddp.errors import CheckpointError
from flyte_ddp.events import CheckpointFailed, CheckpointRefused, CheckpointWritten, Event

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO


def checkpoint_files(key: str, emit: Callable[[Event], None]) -> "CheckpointIO":
    """Saves and loads the checkpoints of Lightning's Trainer; key identifies all that determines the result."""
    from lightning.fabric.plugins import CheckpointIO

    class OwnFiles(CheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            started = time.monotonic()
            try:
                write_checkpoint(Path(path), {"identity": {"training": key}, "state": checkpoint})
            except OSError as error:  # training need not fail because a disk does
                emit(CheckpointFailed(f"{path}: {error.strerror}"))
            else:
                seconds = time.monotonic() - started
                emit(CheckpointWritten(checkpoint["epoch"], 0, str(path), stall_seconds=seconds, write_seconds=0.0))

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
            content: dict[str, Any] = read_checkpoint(Path(path), {"training": key})["state"]
            return content

        def remove_checkpoint(self, path: Any) -> None:
            Path(path).unlink(missing_ok=True)

    return OwnFiles()


def usable_checkpoint(path: Path, key: str, emit: Callable[[Event], None]) -> Path | None:
    """The path, if there is a checkpoint of this training; all ranks of a host get the same answer."""
    if not path.exists():
        return None
    try:
        read_checkpoint(path, {"training": key})
    except CheckpointError as error:
        emit(CheckpointRefused(f"the checkpoint {error}"))
        return None
    return path
