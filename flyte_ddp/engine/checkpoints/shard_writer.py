"""The writer of sharded trainings' checkpoints.

Each rank writes its rows to a file. Then rank 0 writes the manifest, which makes all files the checkpoint at once.
"""

import errno
import itertools
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.checkpoints.sharded_checkpoint import describe_state
from flyte_ddp.engine.collectives import broadcast_value, gather_values
from flyte_ddp.engine.job import RankStorage
from flyte_ddp.engine.sharding.sharded_state import Shard, cut, cut_rows
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.process_group import gloo_group
from flyte_ddp.manifest import shards_beside, write_manifest
from flyte_ddp.text import explain_error
from flyte_ddp.whole_files import content_digest, sync, sync_folder


class SharedFolder:
    """A destination of checkpoints' files beside the manifest, on a disk that all writing ranks see.

    All methods but begin() may raise OSError.
    """

    def __init__(self, path: Path, environment: Environment):
        """Check that all writing ranks see the folder; a collective.

        Args:
            path: the path of the manifest. All ranks take rank 0's.
            environment: this rank.

        Raises:
            InputError: a rank does not see rank 0's folder. All ranks raise the error.
        """
        self._path, self._start = broadcast_value((path, uuid.uuid4().hex[:8]))
        self._is_first = environment.rank == 0
        self._older: list[Path] = []
        self._numbers = itertools.count()
        if cut().parts > environment.world.local_size:
            self._check(environment)

    def _check(self, environment: Environment) -> None:
        mark = self._path.with_name(f".{self._path.name}-{self._start}.seen")
        if environment.rank == 0:
            with suppress(OSError):
                mark.touch()
        distributed.barrier()
        seen = gather_values(not cut().writes or mark.exists())
        if environment.rank == 0:
            mark.unlink(missing_ok=True)
        if not all(seen):
            raise InputError(
                f"the output folder must be one that all hosts share where a network is sharded over several of them, "
                f"got {self._path.parent}, which rank {seen.index(False)} does not see as rank 0 does: name one on a "
                "shared disk, train in Flyte's tasks, or set options.sharding to off"
            )

    def begin(self, position: str) -> Path:
        """Return the path of a folder to create for a checkpoint's files, the same on all ranks; a collective.

        Args:
            position: the epoch and the step of the checkpoint, such as "3-120".
        """
        # A number, because a step may have two checkpoints, such as one that was due and the last one before a stop
        folder = shards_beside(self._path) / f"{position}-{self._start}-{next(self._numbers)}"
        self._older = []
        if self._is_first:
            with suppress(OSError):  # the next checkpoint removes what this one cannot list
                self._older = [other for other in folder.parent.glob("*") if other != folder]
        return folder

    def keep(self, file: Path) -> None:
        """Do nothing more with a file that is written in the folder."""

    def commit(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which replaces the checkpoint before it. Rank 0 calls it once all files are kept."""
        write_manifest(self._path, manifest)
        for folder in self._older:
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, folder: Path) -> None:
        """Remove the folder of a checkpoint that a rank could not write. Rank 0 calls it instead of commit."""
        shutil.rmtree(folder, ignore_errors=True)


class StorageDestination:
    """A destination in the platform's storage, to which each rank uploads its own file; with SharedFolder's methods.

    Nothing can be removed from the storage, so a few names of folders take turns. A folder that the stored manifest may
    name is left alone, and the others are overwritten.
    """

    def __init__(self, storage: RankStorage):
        self._path = storage.path
        self._storage = storage
        self._start = uuid.uuid4().hex[:8]
        self._taken = set[str]()

    def begin(self, position: str) -> Path:
        names = (f"{self._start}-{number}" for number in itertools.count())
        name = broadcast_value(next(name for name in names if name not in self._taken))
        shards = shards_beside(self._path)
        shutil.rmtree(shards, ignore_errors=True)  # a checkpoint that could not be written may have left files
        return Path(shards, name)

    def keep(self, file: Path) -> None:
        self._storage.put(file)
        shutil.rmtree(file.parent)

    def commit(self, manifest: dict[str, Any]) -> None:
        write_manifest(self._path, manifest)
        self._taken.add(manifest["folder"])  # stays taken if an error leaves it unknown whether the manifest arrived
        self._storage.put_manifest(self._path)
        self._taken = {manifest["folder"]}

    def discard(self, folder: Path) -> None:
        pass


class ShardWriter:
    """A writer of this rank's part of each checkpoint."""

    def __init__(self, destination: SharedFolder | StorageDestination, environment: Environment):
        """Create the process group of the ranks that write; a collective.

        Args:
            destination: where the files and the manifest go.
            environment: this rank.
        """
        self._destination = destination
        self._cut = cut()
        self._group = gloo_group(environment.world, range(self._cut.parts))

    def begin(self, content: dict[str, Any], device: torch.device) -> Callable[[], None]:
        """Copy this rank's rows of the state, and return a function that writes the checkpoint; a collective.

        Afterwards the training may change its tensors. On a CPU, this rank's file is written at once, in place of a
        copy in memory. If that fails, no error is raised until the returned function is called.

        Args:
            content: the content of the checkpoint.
            device: the device of the training.

        Returns:
            A function that a thread of each rank has to call: it is a collective in a process group of its own. The
                function waits until the files of all ranks are on the disk. Rank 0 then writes the manifest, or raises
                OSError if a file could not be written. If a rank is gone, any other rank may raise OSError. With hybrid
                sharding, only the first of the ranks with the same rows writes a file; on the others, the function does
                nothing.
        """
        description, tensors = describe_state(content)
        progress = content["state"]["progress"]
        folder = self._destination.begin(f"{progress['epoch']}-{progress['step']}")
        if not self._cut.writes:
            return lambda: None
        entries = {name: self._entry(tensor) for name, tensor in tensors.items()}
        manifest = {"folder": folder.name, "tensors": entries, "content": description}
        own = {name: self._own_part(tensor) for name, tensor in tensors.items()}
        local = {name: tensor for name, tensor in own.items() if tensor is not None}
        file = folder / _name_file(self._cut.part)
        if device.type == "cpu":
            problem = _try_to_write(file, local)
            return lambda: self._finish(manifest, file, problem)
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in local.items()}
        return lambda: self._finish(manifest, file, _try_to_write(file, copied))

    def _entry(self, tensor: Tensor | Shard) -> dict[str, Any]:
        """Return a tensor's entry in the manifest of the checkpoint.

        Returns:
            A dict with "dtype", such as "float32"; "shape", that of the whole tensor; and "each", the number of rows in
            a file, at least 1. The last files may have fewer. If the tensor is not sharded, the first has all rows.
        """
        count = tensor.shape[0] if tensor.shape else 1
        each = count
        dtype = (tensor.rows if isinstance(tensor, Shard) else tensor).dtype
        if isinstance(tensor, Shard):
            _, each = cut_rows(count, 0, self._cut.parts)
        return {"dtype": str(dtype).removeprefix("torch."), "shape": list(tensor.shape), "each": max(1, each)}

    def _own_part(self, tensor: Tensor | Shard) -> Tensor | None:
        """Return what to write of a tensor to this rank's file; None if nothing is to be written.

        - A Shard gives this rank's rows, not copied if they are contiguous; None if the rank has no rows.
        - Any other tensor gives a copy on rank 0, in which complex numbers are pairs of real ones; None elsewhere.
        """
        if isinstance(tensor, Shard):
            return tensor.rows.contiguous() if len(tensor.rows) else None
        if self._cut.part:
            return None
        # safetensors refuses tensors that share memory, and lacks some complex types
        copied = tensor.clone(memory_format=torch.contiguous_format)
        return torch.view_as_real(copied.resolve_conj()) if copied.is_complex() else copied

    def _finish(self, manifest: dict[str, Any], file: Path, problem: str) -> None:
        digest, problem = ("", problem) if problem else self._keep(file)
        outcomes: list[Any] | None = None if self._cut.part else [None] * self._cut.parts
        try:
            distributed.gather_object((digest, problem), outcomes, group=self._group)
        except RuntimeError as error:  # a rank is gone; training notices that by itself
            raise OSError(errno.EPIPE, f"not all ranks wrote their shards: {str(error).splitlines()[0]}") from None
        if outcomes is None:
            return
        if problems := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]:
            self._destination.discard(file.parent)
            raise OSError(errno.EIO, problems[0])
        self._destination.commit(
            {**manifest, "files": {_name_file(part): digest for part, (digest, _) in enumerate(outcomes)}}
        )

    def _keep(self, file: Path) -> tuple[str, str]:
        """Wait until a written file is on the disk, and hand it to the destination, which may upload and remove it.

        No error is raised.

        Returns:
            The file's SHA-256 in hex, and what went wrong. One of the two texts is empty.
        """
        try:
            with open(file, "rb") as written:
                sync(written)
            sync_folder(file.parent)
            digest = content_digest(file)
            self._destination.keep(file)
            return digest, ""
        except Exception as error:  # whatever the type, the other ranks wait for the outcome
            return "", explain_error(error)


def _name_file(part: int) -> str:
    return f"{part}.safetensors"


def _try_to_write(file: Path, tensors: dict[str, Tensor]) -> str:
    """Create a file's folder, write tensors to the file, and return what went wrong; empty if nothing did."""
    from safetensors.torch import save_file  # an optional library

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
    except Exception as error:
        return explain_error(error)
    return ""
