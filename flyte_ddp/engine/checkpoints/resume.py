"""The resume of a training from its checkpoint, on all ranks."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.block_cache import locked
from flyte_ddp.engine.checkpoints.checkpoint import checksum, read_checkpoint, read_same, refuse, restore
from flyte_ddp.engine.checkpoints.sharded_checkpoint import StoredTensor, find_problem, open_shards
from flyte_ddp.engine.collectives import broadcast_tensor, broadcast_value, gather_values
from flyte_ddp.engine.job import OUTPUT, Job, RankStorage
from flyte_ddp.engine.sharding.mesh import copies, counterparts
from flyte_ddp.engine.sharding.sharded_state import Layout, cut
from flyte_ddp.engine.sharding.sharding import is_sharded, local
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError, OtherTrainingError, RecoverableError
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.manifest import read_manifest
from flyte_ddp.whole_files import remove_leftovers, temporary_beside

OTHER_BASE = "belongs to another training: the weights that model() freezes were others"


def resume(state: TrainingState, job: Job, environment: Environment, link: Link) -> str | None:
    """Restore the training on all ranks from rank 0's checkpoint, if there is one; a collective.

    Rank 0 verifies the file. A rank that sees the same file reads the tensors there, of sharded tensors only its own
    rows. If some ranks don't see the file, as on another host, the tensors are broadcast one by one. If the files of a
    sharded checkpoint are in the platform's storage, each host downloads the files that it needs.

    If the checkpoint cannot be used, or is another training's, the event CheckpointRefused is emitted, and training
    starts from the beginning.

    Returns:
        None: The caller can train, from the checkpoint if it was restored, otherwise from the beginning.

        "float32" or "bfloat16": The checkpoint has this precision, and this training the other one. Nothing was
        restored: the caller has to set up the training in this precision, and call resume() again.

        "": Restoring has failed half-way on some rank. The caller has to set up the training anew, and start from the
        beginning.

    Raises:
        InputError: The refused checkpoint is that of RunOptions.resume_from, or another training's in the output folder
            of train(). If rank 0 refuses the file itself, it alone raises the error; if the checkpoint is refused
            later, all ranks do.
        RecoverableError: A file of the checkpoint cannot be read now, which this rank alone raises. Or the platform's
            storage fails, which all ranks raise.
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
        problem = ""
        try:
            restore(state, copy_in_place(state, content["state"] if content else outline, receivers))
        except CheckpointError as error:
            problem = str(error)
    for reason in filter(None, gather_values(problem)):
        refuse(CheckpointError(reason), options, link.emit)
        return ""
    return None


def state_on_all_ranks(job: Job, emit: Callable[[Event], None], device: torch.device) -> dict[str, Any] | None:
    """Return the state in rank 0's checkpoint on all ranks, with tensors on the CPU; a collective.

    The checkpoint is one file, not sharded. If all ranks see the same file, each one maps its tensors. Otherwise rank 0
    broadcasts each tensor. A checkpoint that cannot be used, or is of another training, is refused by the event
    CheckpointRefused.

    Args:
        job: the training.
        emit: emits an event.
        device: the device that broadcasts tensors.

    Returns:
        The state; None on all ranks if there is no checkpoint, or if it is refused.

    Raises:
        InputError: The refused checkpoint is the one that the user has asked for, or another training's in the output
            folder of train(). Rank 0 alone raises it.
        RecoverableError: The checkpoint cannot be read now. Rank 0 alone raises it.
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
    """Verify the job's checkpoint on rank 0, if there is one, and broadcast what all ranks need of it; a collective.

    If the checkpoint cannot be used, or has other frozen weights than this training, rank 0 refuses it: it emits
    CheckpointRefused. Rank 0 also removes the drafts of a save that was killed.

    Args:
        job: the training.
        emit: emits an event.
        base: the digest of this training's frozen weights; None to compare none.

    Returns:
        Two values. The first is the content of the checkpoint on rank 0, and None on the other ranks. The second is the
        same on all ranks: (checksum, state with meta tensors, manifest, rank 0's options), or None if there is no good
        checkpoint. The manifest is None unless the files are in a storage.

    Raises:
        InputError: The user wants the refused checkpoint. Rank 0 alone raises it.
        RecoverableError: The file is there, but cannot be read now. Rank 0 alone raises it.
    """
    path = Path(job.checkpoint_path)
    content = found = None
    if distributed.get_rank() == 0 and job.checkpoint_path:
        try:
            content = read_checkpoint(path, job.checkpoint_identity, job.hashes)
            if base is not None and content["state"]["base"] != base:  # all ranks have rank 0's weights of the base
                raise OtherTrainingError(OTHER_BASE)
            manifest = read_manifest(path)
            outline = pytree.tree_map_only((Tensor, StoredTensor), _on_meta, content["state"])
            found = checksum(path), outline, manifest if manifest and "url" in manifest else None, job.options
        except FileNotFoundError:  # unlike os.path.exists, which is False where a disk does not answer, too
            pass
        except CheckpointError as error:
            refuse(error, job.options, emit, output=path.parent if job.chosen_by == OUTPUT else None)
        with suppress(OSError):  # ranks that start again in the same pod may have left drafts as large as a checkpoint
            remove_leftovers(path.parent, path.name)
    return content, broadcast_value(found)


def _on_meta(tensor: Tensor | StoredTensor) -> Tensor:
    """Return a meta tensor of the same type, shape and strides."""
    if isinstance(tensor, StoredTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.to("meta")


def _receivers(state: TrainingState, seen: list[bool]) -> Any:
    """Return the process group whose first rank sends the checkpoint's tensors to the others.

    Args:
        state: the training.
        seen: for each rank, whether it can read the checkpoint. Rank 0 can.

    Returns:
        - If all ranks can read the checkpoint: None, since nothing is sent.
        - With hybrid sharding, if all ranks of the first node can read it: the group of the ranks, one on each node,
          that have the same rows of the sharded weights as this rank.
        - Otherwise: the group of all ranks.
    """
    if all(seen):
        return None
    is_hybrid = is_sharded(state.model) and copies() > 1
    return counterparts() if is_hybrid and all(seen[: cut().parts]) else distributed.group.WORLD


def _verify_shards(content: dict[str, Any] | None) -> list[bool]:
    """Verify a sharded checkpoint's files, and return for each rank whether it can read the checkpoint; a collective.

    The ranks that can read the checkpoint divide its files among themselves. Of a checkpoint that is one file, nothing
    is verified.

    Args:
        content: the content of the checkpoint; None on a rank that cannot read it.

    Raises:
        CheckpointError: a file is damaged or missing. All ranks raise this.
        RecoverableError: a file cannot be read now. This rank alone raises it.
    """
    seen = gather_values(content is not None)
    position = sum(seen[: distributed.get_rank()])
    assigned = sorted(content.get("shards", {}).items())[position :: sum(seen)] if content else []
    own_problems = filter(None, (find_problem(*shard) for shard in assigned))
    for problem in filter(None, gather_values(next(own_problems, ""))):
        raise CheckpointError(problem)
    return seen


def copy_in_place(state: TrainingState, saved: dict[str, Any], receivers: Any = None) -> dict[str, Any]:
    """Copy a checkpoint's weights and buffers into the training's networks, and return the state for restore().

    The networks are the trained one and its moving average. The returned state has their own weights and buffers, which
    now have the saved values. All its other tensors are new, such as the optimizer's, or a weight whose shape or dtype
    does not fit. Of a sharded tensor, only this rank's rows are copied.

    Args:
        state: the training that resumes.
        saved: the checkpoint's state, with tensors or StoredTensors. A rank that cannot read the checkpoint passes meta
            tensors.
        receivers: the process group whose first rank sends the tensors to the others; then this is a collective of the
            group. None if each rank can read `saved`.
    """
    networks = {"model": state.model, "average": state.average.model if state.average else None}
    own = {name: network.state_dict() for name, network in networks.items() if network}
    fitting = {path: local(value) for path, value in pytree.tree_flatten_with_path(own)[0]}
    weights = chain.from_iterable(group["params"] for group in state.optimizer.param_groups)
    updated = {number: local(weight) for number, weight in enumerate(weights)}

    def new(path: tuple[Any, ...], value: Tensor) -> Tensor:
        """Return an empty tensor for a value of the checkpoint.

        Torch's optimizers have their numbers of steps on the CPU, and all else where their weights are. The fused ones
        rely on tensors as large as a weight to have the weight's strides, which the saved ones may lack.
        """
        if not value.dim() or [key.key for key in path[:2]] != ["optimizer", "state"]:
            return torch.empty_like(value, device="cpu")
        weight = updated.get(path[2].key)  # None if an optimizer keeps it for all weights, by a key of its own
        alike = value if weight is None or weight.shape != value.shape else weight
        return torch.empty_like(alike, dtype=value.dtype, device=state.device)

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
    """Download the files of a sharded checkpoint that have rows of this rank, and verify them; a collective.

    A context manager. The ranks of a host share a temporary folder for the files. At the end of the block, also after
    an error in it, the ranks wait for one another, and the folder is removed.

    Args:
        manifest: the checkpoint's manifest, whose "url" is the folder of the files in the storage.
        layout: tells which rows of a tensor this rank has.
        storage: downloads a file.
        environment: this rank.

    Yields:
        The checkpoint's content, with StoredTensors. The block may read the rows that `layout` gives this rank, and no
        others.

    Raises:
        CheckpointError: A file that some rank needs is damaged or missing. All ranks raise it.
        RecoverableError: The storage, or the folder for temporary files, fails for some rank. All ranks raise it.
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
    try:
        problem: str | RecoverableError
        try:
            problem = next(filter(None, outcomes), "")
        except RecoverableError as error:  # a rank that raised it at once would leave the others waiting
            problem = error
        except OSError as error:
            problem = RecoverableError(
                f"a checkpoint cannot be downloaded to {folder}: {error.strerror or error}; free or allow space there, "
                "or set TMPDIR to another folder"
            )
        for found in filter(None, gather_values(problem)):
            raise found if isinstance(found, RecoverableError) else CheckpointError(found)
        yield content
    finally:
        distributed.barrier()  # no rank of the host reads the files any more after this
        if environment.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(file: Path, digest: str, url: str, storage: RankStorage) -> str:
    """Download a checkpoint's file from a storage, unless this host has it already, and verify its SHA-256.

    The host's ranks take turns by a lock. An incomplete or damaged download is deleted.

    Args:
        file: the file on this host, whose name is the same in the storage.
        digest: the SHA-256 in hex.
        url: the folder in the storage.
        storage: downloads the file.

    Returns:
        What is wrong with the checkpoint, such as "is damaged: ..."; empty if the file is good.

    Raises:
        RecoverableError: The storage fails. Only this rank raises it.
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
