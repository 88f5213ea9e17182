"""Checkpoints of a training under Lightning, in files like our own: written whole, verified when read."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer

from flyte_ddp.engine.checkpoints.checkpoint import check_readable, write_checkpoint
from flyte_ddp.engine.checkpoints.resume import state_on_all_ranks
from flyte_ddp.engine.job import Job
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.lightning.kept import KeptFiles
from flyte_ddp.lightning.lightning_compat import call_callbacks_on_load, call_module, checkpoint_now
from flyte_ddp.whole_files import replacing

NOWHERE = "a file of another host"
# What __init__ was given: it is given again, and may be of any type
UNNEEDED = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")
KEPT = "flyte_ddp_kept"  # beside Lightning's parts of a checkpoint


class CheckpointFiles(TorchCheckpointIO):
    """A plugin of Lightning that writes and reads checkpoints: in our format the one that a training resumes from.

    Checkpoints of the user's callbacks, at other paths than job.checkpoint_path, are saved as Lightning does.

    Attributes:
        position: the epoch and step, from 0, that training goes on with. Set it before a checkpoint is saved.
    """

    def __init__(self, job: Job, emit: Callable[[Event], None], device: torch.device):
        """Prepare to write and read the checkpoints of a training.

        Args:
            job: the training, with the checkpoint's path.
            emit: gets events of checkpoints that are written, failed or refused.
            device: the device from which this rank can send.
        """
        super().__init__()
        self._job, self._emit, self._device = job, emit, device
        self._path = job.checkpoint_path or NOWHERE
        self._kept = KeptFiles(job)
        self._is_readable = False
        self.position = 0, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint to a path; Lightning calls it on rank 0.

        At job.checkpoint_path, the method writes this library's format. It copies the files that ModelCheckpoints have
        saved to the logs to a folder beside the checkpoint, deletes copies that this checkpoint doesn't need, and emits
        CheckpointWritten with self.position. If a file can't be written, it emits CheckpointFailed instead, and the
        earlier checkpoint stays.

        At any other path, the file is as Lightning writes it, but appears whole or not at all. A URL is left to
        Lightning.

        Raises:
            InputError: a checkpoint of this state could not be read again. Only the first checkpoint is checked.
            OSError: the file at another path than job.checkpoint_path cannot be written.
        """
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        if path != self._path:
            # Lightning alone would write to /tmp, and copy into the old file, of which a reader could find a half
            with replacing(Path(path)) as beside:
                return super().save_checkpoint(checkpoint, beside, storage_options)
        started = time.monotonic()
        state = _needed(checkpoint)
        if not self._is_readable:
            check_readable(state)
            self._is_readable = True
        try:
            state[KEPT] = self._kept.keep(state["callbacks"])
            write_checkpoint(Path(path), {"identity": self._job.checkpoint_identity, "state": state})
        except OSError as error:  # training need not fail because a disk does
            self._emit(CheckpointFailed(f"{path}: {error.strerror}"))
        else:
            self._kept.drop_others(state[KEPT])
            seconds = time.monotonic() - started
            self._emit(CheckpointWritten(*self.position, str(path), stall_seconds=seconds, write_seconds=0.0))

    def check(self, trainer: Trainer) -> None:
        """Raise InputError, before the first step, if a checkpoint of the training could not be read again.

        All ranks call this method, because Lightning may gather the checkpoint by a collective. If gathering fails,
        nothing is checked.
        """
        try:
            checkpoint = checkpoint_now(trainer)
        except Exception:  # a hook may need what a step leaves; the first checkpoint is checked again
            return
        check_readable(_needed(checkpoint))

    def find(self) -> str | None:
        """Find rank 0's checkpoint of this training, and keep its content for load_checkpoint(); a collective.

        Returns:
            The checkpoint's path, for Trainer.fit. None, on all ranks, if there is no checkpoint or it is refused.

        Raises:
            InputError: The refused checkpoint is the one that the user has asked to resume from. Or the output folder
                has another training's checkpoint. Rank 0 alone raises it.
            RecoverableError: The checkpoint cannot be read now. Rank 0 alone raises it.
        """
        self._state = state_on_all_ranks(self._job, self._emit, self._device)
        return self._path if self._state else None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        """Return the state of the checkpoint at a path. Lightning calls it on all ranks.

        For the path that find() has returned, the call is a collective. It returns what find() has kept, and drops it,
        so each such call needs a call of find() before. Rank 0 also puts the files that ModelCheckpoints had saved back
        into the logs, and warns of each file that is gone.

        At any other path, Lightning reads the file.

        Args:
            path: the checkpoint.
            map_location: as in torch.load; not used for the path of find().
            weights_only: as in torch.load; not used for the path of find().

        Raises:
            OSError: Rank 0 cannot write a file to the logs.
        """
        if path != self._path:
            return super().load_checkpoint(path, map_location, weights_only)
        state, self._state = self._state, None
        assert state
        for name in self._kept.restore(state["callbacks"], state.pop(KEPT)):
            warnings.warn(f"{name}, which a ModelCheckpoint had kept, is no longer beside the checkpoint", stacklevel=1)
        return state

    def restore_tensors(self, trainer: Trainer) -> None:
        """Load the weights and the state of optimizers from rank 0's checkpoint once more; a collective.

        Call it after a resume, before a new checkpoint is written, because it reads the file again. It also calls the
        hook on_load_checkpoint of the module and of all callbacks.

        Raises:
            InputError: as find().
            RecoverableError: The checkpoint is gone, or is refused, since it was first read; all ranks raise it. Or it
                cannot be read now; rank 0 alone raises it.
        """
        self.find()
        state, self._state = self._state, None
        if not state:
            raise RecoverableError(f"{self._path} is gone or damaged, but this attempt must load it once more")
        call_module(trainer, "on_load_checkpoint", state)  # it may add what the module's on_save_checkpoint leaves out
        trainer.strategy.load_model_state_dict(state, strict=trainer.lightning_module.strict_loading)
        call_callbacks_on_load(trainer, state)  # a WeightAveraging's checkpoint has the average in place of the weights
        trainer.strategy.load_optimizer_state_dict(state)


def _needed(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.items() if name not in UNNEEDED}
