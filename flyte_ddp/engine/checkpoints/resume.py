"""Resumes a training from its checkpoint, on all ranks."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.checkpoints.checkpoint import checksum, read_checkpoint, read_same, refuse, restore
from flyte_ddp.engine.checkpoints.fetched_shards import fetched
from flyte_ddp.engine.checkpoints.sharded_checkpoint import StoredTensor, problem_of
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.rank_0s import broadcast
from flyte_ddp.engine.sharding.mesh import copies, counterparts
from flyte_ddp.engine.sharding.sharded_state import cut
from flyte_ddp.engine.sharding.sharding import is_sharded, local
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError, OtherTrainingError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.manifest import read_manifest

OTHER_BASE = "belongs to another training: the weights that model() freezes were others"


def resume(state: TrainingState, job: Job, environment: Environment, link: Link) -> str | None:
    """Restores the state on all ranks from rank 0's checkpoint, if there is one that belongs to this training; None
    then, and if there is none. Else, on all ranks alike, the state must be set up anew: in the precision that is
    returned, if the checkpoint has another one; or as it was, if this failed half-way, which returns "".

    Rank 0 verifies the file, and ranks that see the same one map it, too; of a sharded one each reads its rows. If some
    do not see it, those of another host, the tensors are broadcast, one by one; with hybrid sharding, each rank of the
    first node sends its rows to those that have the same. The files of a manifest with a URL are in the platform's
    storage, from which each host gets those that it needs.
    """
    path = Path(job.checkpoint_path)
    content = None
    messages: list[Any] = [None]
    if environment.rank == 0 and os.path.exists(job.checkpoint_path):
        try:
            content = read_checkpoint(path, job.checkpoint_identity, job.hashes)
            if content["state"]["base"] != state.base.digest:  # of which all ranks have rank 0's weights
                raise OtherTrainingError(OTHER_BASE)
            manifest = read_manifest(path)
            outline = pytree.tree_map_only((Tensor, StoredTensor), _on_meta, content["state"])
            manifest = manifest if manifest and "url" in manifest else None
            messages = [(checksum(path), outline, manifest, job.options)]
        except CheckpointError as error:
            refuse(error, job.options, link.emit, output=path.parent if job.is_output else None)
    distributed.broadcast_object_list(messages)
    if messages[0] is None:
        return None
    expected, outline, manifest, options = messages[0]  # options of rank 0, which knows whether it is resume_from's
    precision: str = outline["precision"]
    if precision != state.precision:  # "auto" elsewhere: what has been trained in one goes on in it
        return precision
    with ExitStack() as stack:
        try:
            if manifest and job.storage:
                content = stack.enter_context(fetched(manifest, state.layout, job.storage, environment))
                receivers = None
            else:
                content = content or read_same(path, expected)
                receivers = _receivers(state, _verify_shards(content))
        except CheckpointError as error:
            refuse(error, options, link.emit)
            return None
        try:
            restore(state, in_place(state, content["state"] if content else outline, receivers))
        except CheckpointError as error:
            refuse(error, options, link.emit)
            return ""
    return None


def _on_meta(tensor: Tensor | StoredTensor) -> Tensor:
    """Its type, shape and strides."""
    if isinstance(tensor, StoredTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.to("meta")


def _receivers(state: TrainingState, seen: list[bool]) -> Any:
    """The ranks to which the first of them sends what it reads; None if each can read for itself."""
    if all(seen):
        return None
    is_hybrid = is_sharded(state.model) and copies() > 1
    return counterparts() if is_hybrid and all(seen[: cut().parts]) else distributed.group.WORLD


def _verify_shards(content: dict[str, Any] | None) -> list[bool]:
    """Which ranks have the content of the checkpoint, of whose shards, if any, each of these verifies some; raises
    CheckpointError on all ranks. A collective.
    """
    seen: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(seen, content is not None)
    position, count = sum(seen[: distributed.get_rank()]), sum(seen)
    assigned = sorted(content.get("shards", {}).items())[position::count] if content else []
    problems: list[Any] = [None] * len(seen)
    distributed.all_gather_object(problems, next(filter(None, (problem_of(*shard) for shard in assigned)), ""))
    for problem in filter(None, problems):
        raise CheckpointError(problem)
    return seen


def in_place(state: TrainingState, saved: dict[str, Any], receivers: Any = None) -> dict[str, Any]:
    """The same content with the training's own tensors: those of its networks, where they fit, else new ones; of what
    is sharded, this rank's rows.

    Each is filled from saved, or from what the first of the receivers has; then that of the others may be an outline of
    meta tensors.
    """
    networks = {"model": state.model, "average": state.average.model if state.average else None}
    own = {name: network.state_dict() for name, network in networks.items() if network}
    fitting = {path: local(value) for path, value in pytree.tree_flatten_with_path(own)[0]}
    updated = [local(weight) for group in state.optimizer.param_groups for weight in group["params"]]

    def new(path: tuple[Any, ...], value: Tensor) -> Tensor:
        """Torch's optimizers have their numbers of steps on the CPU, and all else where their weights are; the fused
        ones rely on what is as large as a weight to lie as it does, which it may not where it was saved.
        """
        if not value.dim() or [key.key for key in path[:2]] != ["optimizer", "state"]:
            return torch.empty_like(value, device="cpu")
        weight = updated[path[2].key]
        return torch.empty_like(weight if weight.shape == value.shape else value, dtype=value.dtype)

    def filled(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, (Tensor, StoredTensor)):
            return value
        if receivers is distributed.group.WORLD:  # whose first rank has other rows than most
            value = broadcast(_read(value), state.device, receivers)
        came = _read(state.layout.local(path, value))
        if receivers not in (None, distributed.group.WORLD):
            came = broadcast(came, state.device, receivers)
        tensor = fitting.get(path)
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (came.shape, came.dtype):
            tensor = new(path, came)
        return tensor.copy_(came)

    placed: dict[str, Any] = pytree.tree_map_with_path(filled, saved)
    return placed


def _read(value: Tensor | StoredTensor) -> Tensor:
    return value if isinstance(value, Tensor) else value.read()
