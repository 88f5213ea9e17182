"""The writers of checkpoints, which work while training goes on."""

import contextvars
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

from flyte_ddp.engine.checkpoints.checkpoint import FORMAT, finish_draft, write_checkpoint, write_draft
from flyte_ddp.engine.checkpoints.shard_writer import ShardWriter, SharedFolder, StorageDestination
from flyte_ddp.engine.collectives import broadcast_value
from flyte_ddp.engine.contracts import Resumable
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.launch.environment import Environment
from flyte_ddp.manifest import shards_beside
from flyte_ddp.model_files.weights import copy_to_host
from flyte_ddp.text import explain_error

# A function that copies the content of a checkpoint, whose tensors may change afterwards, and returns a function for a
# thread that writes the copy. Both may raise OSError.
Begin = Callable[[dict[str, Any], torch.device], Callable[[], None]]


def make_checkpoints(
    state: TrainingState, environment: Environment, emit: Callable[[Event], None], job: Job
) -> "CheckpointWriter | None":
    """Return this rank's writer of checkpoints; a collective if the network is sharded.

    Without sharding, rank 0's writer writes a single file, and the other ranks get None. With sharding, each rank gets
    a writer of its own rows; of several ranks with the same rows, only one writes. Only rank 0's writer ever says that
    a checkpoint is due.

    Args:
        state: the state of the training; only its network is looked at.
        environment: this rank.
        emit: gets an event for each checkpoint that was written or has failed.
        job: says where checkpoints go, and how often. With sharding, they go to the job's storage, if it has one, or
            else to a folder that the ranks share.

    Raises:
        InputError: The network is sharded over several hosts, and they do not share the folder. All ranks raise it.
    """
    if not is_sharded(state.model):
        return make_whole_checkpoints(environment, emit, job)
    destination = (
        StorageDestination(job.storage) if job.storage else SharedFolder(Path(job.checkpoint_path), environment)
    )
    kind = StoredCheckpointWriter if job.storage else CheckpointWriter
    every = math.inf if environment.rank else job.options.checkpoint_seconds  # rank 0 decides when
    return kind(ShardWriter(destination, environment).begin, job, every, emit)


def make_whole_checkpoints(
    environment: Environment, emit: Callable[[Event], None], job: Job
) -> "CheckpointWriter | None":
    """Return rank 0's writer of checkpoints, for a training that is not sharded; None on the other ranks.

    The writer writes a single file, and emits whether that has succeeded.
    """
    if environment.rank:
        return None
    return CheckpointWriter(
        partial(begin_file, Path(job.checkpoint_path), {}), job, job.options.checkpoint_seconds, emit
    )


def begin_file(
    path: Path, room: dict[Any, Tensor], content: dict[str, Any], device: torch.device
) -> Callable[[], None]:
    """Copy a checkpoint's content, and return a function that writes the copy to a single file.

    Afterwards the training may change its tensors. The caller runs the returned function in a thread. That function
    replaces the file at the path, and deletes the files of an earlier sharded checkpoint beside it.

    Args:
        path: the checkpoint's file.
        room: the buffers in the host's memory for copies from a GPU: an empty dict at first, and the same dict for each
            later checkpoint. They are overwritten, so the function returned before must have ended. On a CPU the dict
            is not used.
        content: the content of the checkpoint.
        device: the training's device. On a CPU, the copy is a temporary file beside the path.

    Raises:
        OSError: A file cannot be written. The returned function may raise it, too.
    """
    if device.type == "cpu":
        write = partial(finish_draft, write_draft(path, content, device), path)
    else:
        copies = copy_to_host(
            {where: leaf for where, leaf in pytree.tree_flatten_with_path(content)[0] if isinstance(leaf, Tensor)}, room
        )
        copied = pytree.tree_map_with_path(lambda where, leaf: copies.get(where, leaf), content)
        write = partial(write_checkpoint, path, copied)

    def rest() -> None:
        write()
        shutil.rmtree(shards_beside(path), ignore_errors=True)  # a sharded checkpoint before this one has left them

    return rest


class CheckpointWriter:
    """A writer of checkpoints. The state is copied once, and a thread does the rest while training continues.

    The next step changes the weights, so training waits for that copy. From a GPU it goes to the host's memory, from
    where the thread writes it, tensor by tensor. On a CPU the copy is the file itself, in the kernel's cache, which is
    not the process's memory. If memory is short, the kernel writes the file out, and training waits for the disk
    instead of being killed. The thread does checksum, disk and renaming.

    A checkpoint that cannot be written is reported and skipped: training need not fail because a disk does.
    """

    def __init__(self, begin: Begin, job: Job, seconds: float, emit: Callable[[Event], None]):
        """Prepare to write the checkpoints of a training.

        Args:
            begin: copies a checkpoint's content, and returns what writes the copy.
            job: the training, whose identity each checkpoint has.
            seconds: the time between two checkpoints, after which due() returns True.
            emit: gets events of written and failed checkpoints.
        """
        self._begin = begin
        self._path = job.checkpoint_path
        self._belongs_to = {"identity": job.checkpoint_identity, "files": job.hashes}
        self._seconds = seconds
        self._emit = emit
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._last >= self._seconds

    def save(self, state: Resumable, is_last: bool = False) -> None:
        """Wait until the previous checkpoint is written, copy the state, and start a thread that writes the copy.

        If the network is sharded, this is a collective. The thread emits CheckpointWritten or CheckpointFailed. If the
        copy fails with an OSError, save emits CheckpointFailed and returns: nothing is written, and training goes on.

        Args:
            state: the state of the training.
            is_last: has no effect here. A writer to a storage skips a checkpoint while an upload is running, unless it
                is the last one.
        """
        started = time.monotonic()
        self.close()
        content = {"format": FORMAT, **self._belongs_to, "state": state.state_dict()}
        try:
            rest = self._begin(content, state.device)
        except OSError as error:
            self._emit(CheckpointFailed(f"{self._path}: {explain_error(error)}"))
            return
        finally:
            self._last = time.monotonic()
        progress = state.progress
        arguments = (self._write, rest, progress.epoch, progress.step, self._last - started)
        # Only in this thread's context does the platform know its storage
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=arguments)
        self._thread.start()

    def close(self) -> None:
        """Wait until the thread has written the latest checkpoint."""
        if self._thread:
            self._thread.join()

    def _write(self, rest: Callable[[], None], epoch: int, step: int, stall_seconds: float) -> None:
        started = time.monotonic()
        try:
            rest()
        except Exception as error:  # nobody else would notice an error in this thread
            self._emit(CheckpointFailed(f"{self._path}: {explain_error(error)}"))
        else:
            seconds = time.monotonic() - started
            self._emit(CheckpointWritten(epoch, step, self._path, stall_seconds, seconds))


class StoredCheckpointWriter(CheckpointWriter):
    """A writer that treats the upload to a storage as a part of writing.

    The upload may take longer than an epoch. While it runs, the next checkpoint is skipped, unless it is the last.
    """

    def due(self) -> bool:
        return super().due() and not self._is_busy()

    def save(self, state: Resumable, is_last: bool = False) -> None:
        # Rank 0 decides, because its thread ends last: it waits for the others
        if broadcast_value(is_last or not self._is_busy()):
            super().save(state, is_last)

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
