"""The reader of a checkpoint of one file for all ranks, some of which may not see the file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.checkpoints.checkpoint import checksum, read_checkpoint, read_same, refuse
from flyte_ddp.engine.collectives import broadcast_tensor, broadcast_value, gather_values
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError
from flyte_ddp.events import Event


def state_on_all_ranks(job: Job, emit: Callable[[Event], None], device: torch.device) -> dict[str, Any] | None:
    """Return the state in rank 0's checkpoint, if that is of this training; a collective.

    The checkpoint is one file, not sharded. Ranks that see the same file map its tensors. If some rank doesn't, as on
    another host, rank 0 broadcasts each tensor to all.

    Args:
        job: the training, with the checkpoint's path and the identity that the checkpoint must have.
        emit: gets the event of a checkpoint that is refused.
        device: the device from which this rank can send.

    Returns:
        The state, with tensors on the CPU. None, on all ranks, if there is no checkpoint or it is refused.

    Raises:
        InputError: The user has asked for the checkpoint that is refused, or it is another training's in the output
            folder of train(). Rank 0 alone raises it.
    """
    path = Path(job.checkpoint_path)
    found = None
    if distributed.get_rank() == 0 and os.path.exists(job.checkpoint_path):
        try:
            state = read_checkpoint(path, job.checkpoint_identity, job.hashes)["state"]
            found = (checksum(path), pytree.tree_map_only(Tensor, lambda one: one.to("meta"), state))
        except CheckpointError as error:
            refuse(error, job.options, emit, output=path.parent if job.is_output else None)
    found = broadcast_value(found)
    if found is None:
        return None
    expected, outline = found
    content = read_same(path, expected)
    is_seen_by_all = all(gather_values(content is not None))
    state = content["state"] if content else outline
    return (
        state
        if is_seen_by_all
        else pytree.tree_map_only(Tensor, lambda one: broadcast_tensor(one, device).cpu(), state)
    )
