"""Writes checkpoints of sharded trainings: each rank its rows to a file, then rank 0 the manifest, which makes all of
them the checkpoint at once.
"""

import errno
import itertools
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.checkpoints.sharded_checkpoint import described
from flyte_ddp.engine.job import RankStorage
from flyte_ddp.engine.sharding.sharded_state import Shard, cut, rows_of
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.process_group import gloo_group
from flyte_ddp.manifest import shards_beside, write_manifest
from flyte_ddp.text import reason_of
from flyte_ddp.whole_files import content_digest, sync, sync_folder


class Destination(Protocol):
    """A place for the files of checkpoints, and the manifest that says which of them count. All may raise OSError."""

    def begin(self, position: str) -> Path:
        """The folder for this rank's file of the next one; a collective."""

    def keep(self, file: Path) -> None:
        """Put the file, which is on this host's disk, where it has to be before the manifest may name it."""

    def commit(self, manifest: dict[str, Any]) -> None:
        """Make this the checkpoint, in place of the one before; called on rank 0."""

    def discard(self, folder: Path) -> None:
        """Called on rank 0 if a file is missing."""


class SharedFolder:
    """Beside the manifest, on a disk that all ranks that write see."""

    def __init__(self, path: Path, environment: Environment):
        """A collective. path: of the manifest; rank 0's counts. Raises InputError if others do not see its folder."""
        values: list[Any] = [path, uuid.uuid4().hex[:8]]
        distributed.broadcast_object_list(values)
        self._path, self._start = values
        self._older: list[Path] = []
        if cut().parts > environment.world.local_size:
            self._check(environment)

    def _check(self, environment: Environment) -> None:
        mark = self._path.with_name(f".{self._path.name}-{self._start}.seen")
        if environment.rank == 0:
            with suppress(OSError):
                mark.touch()
        distributed.barrier()
        seen: list[Any] = [None] * environment.world.size
        distributed.all_gather_object(seen, not cut().writes or mark.exists())
        if environment.rank == 0:
            mark.unlink(missing_ok=True)
        if not all(seen):
            raise InputError(
                f"the output folder must be one that all hosts share where a network is sharded over several of them, "
                f"got {self._path.parent}, which rank {seen.index(False)} does not see as rank 0 does: name one on a "
                "shared disk, train in Flyte's tasks, or set options.sharding to off"
            )

    def begin(self, position: str) -> Path:
        folder = shards_beside(self._path) / f"{position}-{self._start}"
        self._older = [other for other in folder.parent.glob("*") if other != folder]
        return folder

    def keep(self, file: Path) -> None:
        pass

    def commit(self, manifest: dict[str, Any]) -> None:
        write_manifest(self._path, manifest)
        for folder in self._older:
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)


class Stored:
    """In the platform's storage, to which each rank uploads its own file.

    Nothing is removed from there. So there are few names for folders: those of this start of the ranks that the stored
    manifest may name are left alone, and the others are used again.
    """

    def __init__(self, storage: RankStorage):
        self._path = storage.path
        self._storage = storage
        self._start = uuid.uuid4().hex[:8]
        self._taken = set[str]()

    def begin(self, position: str) -> Path:
        names = [next(name for name in (f"{self._start}-{n}" for n in itertools.count()) if name not in self._taken)]
        distributed.broadcast_object_list(names)
        shards = shards_beside(self._path)
        shutil.rmtree(shards, ignore_errors=True)  # of one that could not be written
        return shards / names[0]

    def keep(self, file: Path) -> None:
        self._storage.put(file)
        shutil.rmtree(file.parent)

    def commit(self, manifest: dict[str, Any]) -> None:
        write_manifest(self._path, manifest)
        self._taken.add(manifest["folder"])  # for good, should it be unknown whether the manifest has arrived
        self._storage.put_manifest(self._path)
        self._taken = {manifest["folder"]}

    def discard(self, folder: Path) -> None:
        pass


class ShardWriter:
    """Writes this rank's part of each checkpoint."""

    def __init__(self, destination: Destination, environment: Environment):
        """A collective."""
        self._destination = destination
        self._cut = cut()
        self._group = gloo_group(environment.world, range(self._cut.parts))

    def begin(self, content: dict[str, Any], device: torch.device) -> Callable[[], None]:
        """Copy this rank's tensors; what it returns writes the checkpoint, a collective for a thread of each rank,
        which raises OSError on rank 0 if any rank fails.
        """
        description, tensors = described(content)
        progress = content["state"]["progress"]
        folder = self._destination.begin(f"{progress['epoch']}-{progress['step']}")
        if not self._cut.writes:
            return lambda: None
        entries = {name: self._entry(tensor) for name, tensor in tensors.items()}
        manifest = {"folder": folder.name, "tensors": entries, "content": description}
        own = {name: self._own(tensor) for name, tensor in tensors.items()}
        local = {name: tensor for name, tensor in own.items() if tensor is not None}
        file = folder / _file_of(self._cut.part)
        if device.type == "cpu":
            problem = _write(file, local)
            return lambda: self._finish(manifest, file, problem)
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in local.items()}
        return lambda: self._finish(manifest, file, _write(file, copied))

    def _entry(self, tensor: Tensor | Shard) -> dict[str, Any]:
        """Return what the manifest says of a tensor; of what is not sharded the first file has all."""
        count = tensor.shape[0] if tensor.shape else 1
        each = count
        dtype = (tensor.rows if isinstance(tensor, Shard) else tensor).dtype
        if isinstance(tensor, Shard):
            _, each = rows_of(count, 0, self._cut.parts)
        return {"dtype": str(dtype).removeprefix("torch."), "shape": list(tensor.shape), "each": max(1, each)}

    def _own(self, tensor: Tensor | Shard) -> Tensor | None:
        """What this rank's file has of it: of what is not sharded rank 0's has all, as a copy: it may share memory with
        others, which safetensors refuses. Complex numbers, some of which it lacks, are pairs of real ones.
        """
        if isinstance(tensor, Shard):
            return tensor.rows.contiguous() if len(tensor.rows) else None
        if self._cut.part:
            return None
        copied = tensor.clone(memory_format=torch.contiguous_format)
        return torch.view_as_real(copied.resolve_conj()) if copied.is_complex() else copied

    def _finish(self, manifest: dict[str, Any], file: Path, problem: str) -> None:
        digest, problem = ("", problem) if problem else self._kept(file)
        outcomes: list[Any] | None = None if self._cut.part else [None] * self._cut.parts
        try:
            distributed.gather_object((digest, problem), outcomes, group=self._group)
        except RuntimeError as error:  # a rank is gone, of which training hears by itself
            raise OSError(errno.EPIPE, f"not all ranks wrote their shards: {str(error).splitlines()[0]}") from None
        if outcomes is None:
            return
        if problems := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]:
            self._destination.discard(file.parent)
            raise OSError(errno.EIO, problems[0])
        self._destination.commit(
            {**manifest, "files": {_file_of(part): digest for part, (digest, _) in enumerate(outcomes)}}
        )

    def _kept(self, file: Path) -> tuple[str, str]:
        """The digest of a file that is kept from now on, and what went wrong, if anything did."""
        try:
            with open(file, "rb") as written:
                sync(written)
            sync_folder(file.parent)
            digest = content_digest(file)
            self._destination.keep(file)
            return digest, ""
        except Exception as error:  # of whatever type: the others wait to hear of it
            return "", reason_of(error)


def _file_of(part: int) -> str:
    return f"{part}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to a file; returns what went wrong, if anything did: the others must hear of it."""
    from safetensors.torch import save_file  # an optional library

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
    except Exception as error:
        return reason_of(error)
    return ""
