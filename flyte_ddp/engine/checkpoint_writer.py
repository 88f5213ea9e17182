"""Writes checkpoints while training goes on."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.engine.checkpoint import FORMAT, finish, write_checkpoint, write_draft
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.loop import Checkpoints
from flyte_ddp.engine.sharded_checkpoint import ShardWriter
from flyte_ddp.engine.sharded_state import Shard, fill
from flyte_ddp.engine.sharding import is_sharded
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.launch.environment import Environment
from flyte_ddp.manifest import shards_beside

# Copies the content of a checkpoint, whose tensors may change then; what it returns, for a thread, writes it. Both may
# raise OSError
Begin = Callable[[dict[str, Any], torch.device], Callable[[], None]]


def checkpoints_of(
    state: TrainingState, environment: Environment, emit: Callable[[Event], None], job: Job
) -> Checkpoints:
    """What writes this rank's part of the checkpoints; a collective of a sharded network."""
    world, path, every = environment.world, Path(job.checkpoint_path), job.options.checkpoint_seconds
    if is_sharded(state.model) and world.size == world.local_size:
        every = math.inf if environment.rank else every  # rank 0 says when
        return CheckpointWriter(ShardWriter(path, environment).begin, job, every, emit)
    return NoCheckpoints() if environment.rank else CheckpointWriter(partial(begin_file, path), job, every, emit)


def begin_file(path: Path, content: dict[str, Any], device: torch.device) -> Callable[[], None]:
    """Begin for a single file at path, beside which the copy is; but that from a GPU is in the host's memory."""
    # What is sharded comes from other hosts, too, row by row into the file
    if device.type == "cpu" or any(isinstance(leaf, Shard) for leaf in pytree.tree_leaves(content)):
        write = partial(finish, write_draft(path, content, device), path)
    else:
        copied = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("cpu", copy=True), content)
        write = partial(write_checkpoint, path, copied)

    def rest() -> None:
        write()
        shutil.rmtree(shards_beside(path), ignore_errors=True)  # of a checkpoint before this one

    return rest


class CheckpointWriter:
    """Writes checkpoints: the state is copied once, and a thread sees to the rest while training continues.

    The next step changes the weights, so training waits for that copy. From a GPU it goes to the host's memory, from
    where the thread writes it, tensor by tensor. On a CPU the copy is the file itself, in the kernel's cache, which is
    not the process's memory: where memory is short the kernel writes it out, and training waits for the disk instead of
    being killed. Checksum, disk and renaming are left to the thread.

    A checkpoint that cannot be written is reported and skipped: training need not fail because a disk does.
    """

    def __init__(self, begin: Begin, job: Job, seconds: float, emit: Callable[[Event], None]):
        """begin: copies a state. seconds: between two checkpoints that this rank asks for."""
        self._begin, self._path, self._identity = begin, job.checkpoint_path, job.identity
        self._seconds, self._emit = seconds, emit
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._last >= self._seconds

    def save(self, state: TrainingState) -> None:
        started = time.monotonic()
        self.close()
        content = {"format": FORMAT, "identity": self._identity, "state": state.state_dict()}
        try:
            rest = self._begin(content, state.device)
        except OSError as error:
            self._emit(CheckpointFailed(f"{self._path}: {error.strerror}"))
            return
        finally:
            self._last = time.monotonic()
        arguments = (rest, state.epoch, state.step, self._last - started)
        self._thread = threading.Thread(target=self._write, args=arguments)
        self._thread.start()

    def close(self) -> None:
        """Waits until the current checkpoint is written."""
        if self._thread:
            self._thread.join()

    def _write(self, rest: Callable[[], None], epoch: int, step: int, stall_seconds: float) -> None:
        started = time.monotonic()
        try:
            rest()
        except OSError as error:
            self._emit(CheckpointFailed(f"{self._path}: {error.strerror}"))
        else:
            seconds = time.monotonic() - started
            self._emit(CheckpointWritten(epoch, step, self._path, stall_seconds, seconds))


class NoCheckpoints:
    """Writes nothing, for the other ranks: rank 0 has the same state, or gets what is sharded from other hosts, too."""

    def due(self) -> bool:
        return False

    def save(self, state: TrainingState) -> None:
        fill(None, state.state_dict(), state.device)

    def close(self) -> None:
        pass
