"""Checkpoints of a training under Lightning, in files like our own: written whole, verified when read."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, distributed

from flyte_ddp.engine.checkpoints.checkpoint import (
    check_readable,
    checksum,
    read_checkpoint,
    read_same,
    refuse,
    write_checkpoint,
)
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError
from flyte_ddp.events import CheckpointFailed, CheckpointWritten, Event
from flyte_ddp.settings import RunOptions

NOWHERE = "a file of another host"
# What __init__ was given: it is given again, and may be of any type
UNNEEDED = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")


class CheckpointFiles(TorchCheckpointIO):
    """Saves and loads the checkpoint that a training resumes from. Those of the module's own callbacks are Lightning's.

    Attributes:
        position: epoch and step, from 0, that training goes on with; whoever saves sets it.
    """

    def __init__(self, path: str, identity: Mapping[str, Any], emit: Callable[[Event], None], device: torch.device):
        """path: of that checkpoint, empty on another host than rank 0's. identity: all that determines the result.
        device: from which this rank can send."""
        super().__init__()
        self._path, self._identity, self._emit, self._device = path or NOWHERE, dict(identity), emit, device
        self._is_readable = False
        self.position = 0, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if path != self._path:
            return super().save_checkpoint(checkpoint, path, storage_options)
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

    def find(self, options: RunOptions) -> str | None:
        """The path, if rank 0, perhaps on another host, has a checkpoint of this training there; a collective."""
        objects: list[Any] = [None]
        if distributed.get_rank() == 0 and os.path.exists(self._path):
            path = Path(self._path)
            try:
                state = read_checkpoint(path, self._identity)["state"]
                objects = [(checksum(path), pytree.tree_map_only(Tensor, lambda one: one.to("meta"), state))]
            except CheckpointError as error:
                refuse(error, options, self._emit)
        distributed.broadcast_object_list(objects)
        self._checksum_and_outline = objects[0]
        return self._path if self._checksum_and_outline else None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        """What find has found; the tensors are sent, one by one, if a rank of another host lacks the file."""
        if path != self._path:
            return super().load_checkpoint(path, map_location, weights_only)
        expected, outline = self._checksum_and_outline
        content = read_same(Path(path), expected)
        seen: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(seen, content is not None)
        state: dict[str, Any] = content["state"] if content else outline
        return state if all(seen) else pytree.tree_map_only(Tensor, self._sent, state)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Rank 0's."""
        sent = torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.to(self._device)
        sent = sent.contiguous()
        distributed.broadcast(sent.view(-1).view(torch.uint8), 0)  # not all types can be sent
        return sent.cpu()
