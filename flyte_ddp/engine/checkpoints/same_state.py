"""The state in a checkpoint of one file, on all ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.checkpoints.checkpoint import checksum, read_checkpoint, read_same, refuse
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.rank_0s import broadcast
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError
from flyte_ddp.events import Event


def state_on_all_ranks(job: Job, emit: Callable[[Event], None], device: torch.device) -> dict[str, Any] | None:
    """Return the state in rank 0's checkpoint, if there is one of this training. All ranks must call it.

    Rank 0 may be on another host. The tensors are mapped from the file, on the CPU. If some rank lacks the file, they
    are sent, one by one.

    Args:
        job: the training.
        emit: gets events.
        device: from which this rank can send.
    """
    path = Path(job.checkpoint_path)
    objects = [None]
    if distributed.get_rank() == 0 and os.path.exists(job.checkpoint_path):
        try:
            state = read_checkpoint(path, job.checkpoint_identity, job.hashes)["state"]
            objects = [(checksum(path), pytree.tree_map_only(Tensor, lambda one: one.to("meta"), state))]  # type: ignore[list-item]
        except CheckpointError as error:
            refuse(error, job.options, emit, output=path.parent if job.is_output else None)
    distributed.broadcast_object_list(objects)
    if objects[0] is None:
        return None
    expected, outline = objects[0]
    content = read_same(path, expected)
    seen: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(seen, content is not None)
    state = content["state"] if content else outline
    return state if all(seen) else pytree.tree_map_only(Tensor, lambda one: broadcast(one, device).cpu(), state)
