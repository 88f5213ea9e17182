"""The resume of a training from its checkpoint, on all ranks."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.block_cache import locked
from flyte_ddp.engine.checkpoints.checkpoint import checksum, read_checkpoint, read_same, refuse, restore
from flyte_ddp.engine.checkpoints.sharded_checkpoint import StoredTensor, find_problem, open_shards
from flyte_ddp.engine.collectives import broadcast_tensor, broadcast_value, gather_values
from flyte_ddp.engine.job import Job, RankStorage
from flyte_ddp.engine.sharding.mesh import copies, counterparts
from flyte_ddp.engine.sharding.sharded_state import Layout, cut
from flyte_ddp.engine.sharding.sharding import is_sharded, local
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError, OtherTrainingError
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.manifest import read_manifest
from flyte_ddp.whole_files import temporary_beside

OTHER_BASE = "belongs to another training: the weights that model() freezes were others"


def resume(state: TrainingState, job: Job, environment: Environment, link: Link) -> str | None:
    """Restore the training on all ranks from rank 0's checkpoint, if there is one of this training; a collective.

    Rank 0 verifies the file, and ranks that see the same file map it, too; of a sharded checkpoint each rank reads its
    rows. If some ranks do not see it, such as those of another host, the tensors are broadcast, one by one. With hybrid
    sharding, each rank of the first node then sends its rows to the ranks that have the same. If a manifest has a URL,
    its files are in the platform's storage, from which each host downloads those that it needs.

    A checkpoint that cannot be used is refused with an event, and training starts anew.

    Returns:
        None if training can go on, from the checkpoint if it was restored, or else from the start.

        "float32" or "bfloat16" if the checkpoint was trained in this precision. Nothing was restored: the caller has to
        set up the training in this precision, and call resume() again.

        An empty text if restoring has failed half-way. The caller has to set up the training anew, and start from the
        beginning.

    Raises:
        InputError: The refused checkpoint is that of RunOptions.resume_from, or another training's in the output folder
            of train(). Rank 0 alone raises it if the file itself is refused; all ranks do if it is refused later.
        RecoverableError: The platform's storage fails. This rank alone raises it.
    """
    content, found = _find(job, link.emit, state.base.digest)
    if found is None:
        return None
    expected, outline, manifest, options = found  # only rank 0 knows whether the checkpoint is resume_from's
    precision: str = outline["precision"]
    if precision != state.precision:  # "auto" may choose another one here, but a training keeps its precision
        return precision
    with ExitStack() as stack:
        try:
            if manifest and job.storage:
                content = stack.enter_context(fetch_shards(manifest, state.layout, job.storage, environment))
                receivers = None
            else:
                content = content or read_same(Path(job.checkpoint_path), expected)
                receivers = _receivers(state, _verify_shards(content))
        except CheckpointError as error:
            refuse(error, options, link.emit)
            return None
        try:
            restore(state, copy_in_place(state, content["state"] if content else outline, receivers))
        except CheckpointError as error:
            refuse(error, options, link.emit)
            return ""
    return None


def state_on_all_ranks(job: Job, emit: Callable[[Event], None], device: torch.device) -> dict[str, Any] | None:
    """Return the state in rank 0's checkpoint, if that is of this training, with tensors on the CPU; a collective.

    The checkpoint is one file, not sharded. Ranks that see the same file map its tensors. If some rank doesn't, as on
    another host, rank 0 broadcasts each tensor to all. None is returned, on all ranks, if there is no checkpoint or it
    is refused.

    Raises:
        InputError: The user has asked for the checkpoint that is refused, or it is another training's in the output
            folder of train(). Rank 0 alone raises it.
    """
    content, found = _find(job, emit)
    if found is None:
        return None
    expected, outline, *_ = found
    content = content or read_same(Path(job.checkpoint_path), expected)
    is_seen_by_all = all(gather_values(content is not None))
    state: dict[str, Any] = content["state"] if content else outline
    if is_seen_by_all:
        return state
    sent: dict[str, Any] = pytree.tree_map_only(Tensor, lambda one: broadcast_tensor(one, device).cpu(), state)
    return sent


def _find(job: Job, emit: Callable[[Event], None], base: str | None = None) -> tuple[dict[str, Any] | None, Any]:
    """Verify the job's checkpoint on rank 0, if there is one, and tell all ranks of it; a collective.

    A checkpoint that is no good, or whose frozen weights have another digest than `base`, is refused by an event, or by
    an InputError that rank 0 alone raises.

    Returns:
        On rank 0 the content, which is None on the others; and what all ranks need to know of it, None if there is no
        good one: checksum, state with meta tensors, the manifest if its files are in a storage, and rank 0's options.
    """
    path = Path(job.checkpoint_path)
    content = found = None
    if distributed.get_rank() == 0 and os.path.exists(job.checkpoint_path):
        try:
            content = read_checkpoint(path, job.checkpoint_identity, job.hashes)
            if base is not None and content["state"]["base"] != base:  # all ranks have rank 0's weights of the base
                raise OtherTrainingError(OTHER_BASE)
            manifest = read_manifest(path)
            outline = pytree.tree_map_only((Tensor, StoredTensor), _on_meta, content["state"])
            found = checksum(path), outline, manifest if manifest and "url" in manifest else None, job.options
        except CheckpointError as error:
            refuse(error, job.options, emit, output=path.parent if job.is_output else None)
    return content, broadcast_value(found)


def _on_meta(tensor: Tensor | StoredTensor) -> Tensor:
    """Return a meta tensor of the same type, shape and strides."""
    if isinstance(tensor, StoredTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.to("meta")


def _receivers(state: TrainingState, seen: list[bool]) -> Any:
    """Return the process group whose first rank sends the checkpoint's tensors to the others; None if all can read it.

    `seen` says which ranks can read it. With hybrid sharding it is the group of the ranks with the same rows, if the
    whole first node can read the checkpoint. Otherwise it is the group of all ranks.
    """
    if all(seen):
        return None
    is_hybrid = is_sharded(state.model) and copies() > 1
    return counterparts() if is_hybrid and all(seen[: cut().parts]) else distributed.group.WORLD


def _verify_shards(content: dict[str, Any] | None) -> list[bool]:
    """Verify a sharded checkpoint's files, and return for each rank whether it can read the checkpoint; a collective.

    The ranks that can read the checkpoint divide its files among themselves. A checkpoint that is one file is not
    verified here.

    Args:
        content: the content of the checkpoint; None on a rank that cannot read it.

    Raises:
        CheckpointError: a file is damaged or missing. All ranks raise this.
    """
    seen = gather_values(content is not None)
    position = sum(seen[: distributed.get_rank()])
    assigned = sorted(content.get("shards", {}).items())[position :: sum(seen)] if content else []
    own_problems = filter(None, (find_problem(*shard) for shard in assigned))
    for problem in filter(None, gather_values(next(own_problems, ""))):
        raise CheckpointError(problem)
    return seen


def copy_in_place(state: TrainingState, saved: dict[str, Any], receivers: Any = None) -> dict[str, Any]:
    """Copy a checkpoint's state into the training's weights and buffers, and into new tensors where those don't fit.

    Weights and buffers have the saved values after this. The rest, such as the optimizer's state, is in new tensors,
    which restore() has to load. Of sharded tensors, this rank's rows alone are copied.

    Args:
        state: the training that resumes.
        saved: the checkpoint's state, with tensors or StoredTensors. A rank that cannot read the checkpoint has meta
            tensors.
        receivers: a process group, whose first rank sends the tensors to the others, so that this is a collective of
            the group; None if each rank can read `saved`.
    """
    networks = {"model": state.model, "average": state.average.model if state.average else None}
    own = {name: network.state_dict() for name, network in networks.items() if network}
    fitting = {path: local(value) for path, value in pytree.tree_flatten_with_path(own)[0]}
    weights = chain.from_iterable(group["params"] for group in state.optimizer.param_groups)
    updated = [local(weight) for weight in weights]

    def new(path: tuple[Any, ...], value: Tensor) -> Tensor:
        """Return an empty tensor for a value of the checkpoint.

        Torch's optimizers have their numbers of steps on the CPU, and all else where their weights are. The fused ones
        rely on tensors as large as a weight to have the weight's strides, which the saved ones may lack.
        """
        if not value.dim() or [key.key for key in path[:2]] != ["optimizer", "state"]:
            return torch.empty_like(value, device="cpu")
        weight = updated[path[2].key]
        return torch.empty_like(weight if weight.shape == value.shape else value, dtype=value.dtype)

    def filled(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, (Tensor, StoredTensor)):
            return value
        if receivers is distributed.group.WORLD:  # the first rank has other rows than most
            value = broadcast_tensor(_read(value), state.device, receivers)
        came = _read(state.layout.local(path, value))
        if receivers not in (None, distributed.group.WORLD):
            came = broadcast_tensor(came, state.device, receivers)
        tensor = fitting.get(path)
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (came.shape, came.dtype):
            tensor = new(path, came)
        return tensor.copy_(came)

    placed: dict[str, Any] = pytree.tree_map_with_path(filled, saved)
    return placed


def _read(value: Tensor | StoredTensor) -> Tensor:
    return value if isinstance(value, Tensor) else value.read()


# --- downloads of sharded checkpoints ---


@contextmanager
def fetch_shards(
    manifest: dict[str, Any], layout: Layout, storage: RankStorage, environment: Environment
) -> Iterator[dict[str, Any]]:
    """Download the files that have rows of this rank, verify them, and yield the checkpoint's content; a collective.

    The manifest's "url" is the folder in the storage. The host's ranks share a temporary folder for the files. After
    the block the ranks wait for one another, and the folder is removed. The content's tensors are StoredTensors: the
    block may read the rows that `layout` gives this rank, and no others.

    Raises:
        CheckpointError: Some rank's file is damaged or missing. All ranks raise it.
        RecoverableError: The storage fails. Only the rank that meets this raises it, and the other ranks wait for that
            rank.
    """
    name = broadcast_value(f"checkpoint-{uuid.uuid4().hex}")
    folder = Path(tempfile.gettempdir(), name)  # this job's ranks on this host share the folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = open_shards(folder, manifest)
    leaves = pytree.tree_flatten_with_path(content["state"])[0]
    tensors = [layout.local(path, leaf) for path, leaf in leaves if isinstance(leaf, StoredTensor)]
    parts = chain.from_iterable(tensor.parts() for tensor in tensors)
    needed = list(dict.fromkeys(file for file, _, _ in parts))
    first = len(needed) * environment.local_rank // environment.world.local_size
    shared_out = needed[first:] + needed[:first]  # each rank of a host begins with another file
    outcomes = (_fetch(file, content["shards"][file], manifest["url"], storage) for file in shared_out)
    problems = gather_values(next(filter(None, outcomes), ""))
    try:
        for problem in filter(None, problems):
            raise CheckpointError(problem)
        yield content
    finally:
        distributed.barrier()  # no rank of the host reads the files any more after this
        if environment.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(file: Path, digest: str, url: str, storage: RankStorage) -> str:
    """Download a checkpoint's file from the folder `url` to this host, unless another rank has, and verify its SHA-256.

    The host's ranks take turns by a lock. An incomplete or damaged download is deleted. RecoverableError is raised if
    the storage fails, by this rank alone.

    Returns:
        The problem, to follow the checkpoint's name in a message, such as "is damaged: …". Empty if there is none.
    """
    with locked(file.with_suffix(".lock")):
        if file.exists():
            return ""
        beside = temporary_beside(file)
        beside.mkdir()
        try:
            storage.get(f"{url}/{file.name}", beside / file.name)
            problem = find_problem(beside / file.name, digest)
            if not problem:
                os.replace(beside / file.name, file)
            return problem
        except FileNotFoundError:
            return f"is incomplete: {file.name} of its shards is not in the storage"
        finally:
            shutil.rmtree(beside, ignore_errors=True)
