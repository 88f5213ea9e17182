"""Checkpoints of sharded trainings: each rank writes its rows to a file, then rank 0 the manifest, which makes all of
them the checkpoint at once. Nothing in them is unpickled.

The manifest has the state as JSON, but for its tensors: of these it has type, shape, and which rows are in which file.
So a rank of any other training of this recipe, sharded or not, reads what it needs and nothing else.
"""

import errno
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from flyte_ddp.engine.sharded_state import Shard, rows_of
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.process_group import gloo_group
from flyte_ddp.manifest import shards_beside, write_manifest
from flyte_ddp.storage import content_digest, sync, sync_folder

PLAIN = (str, int, float, bool, type(None))  # what JSON has, too


@dataclass(frozen=True)
class StoredTensor:
    """Rows of a tensor of a sharded checkpoint, in files.

    Attributes:
        name: in the files.
        shape: of these rows; () for a number.
        rows: file, first row and last, exclusive, of each part of the whole tensor; none of one without rows.
        first: the first of these rows in the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: tuple[tuple[Path, int, int], ...]
    first: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "StoredTensor":
        first, last, _ = rows.indices(len(self))
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first)

    def read(self) -> Tensor:
        from safetensors import safe_open  # an optional library

        found = torch.empty(self.shape, dtype=self.dtype)
        if not self.shape:
            with safe_open(self.rows[0][0], "pt") as file:
                return found.copy_(file.get_tensor(self.name))
        for path, first, last in self.rows:
            begin, end = max(first, self.first), min(last, self.first + len(self))
            if begin < end:
                with safe_open(path, "pt") as file:
                    part = file.get_slice(self.name)[begin - first : end - first]
                found[begin - self.first : end - self.first] = part
        return found


def described(state: Any) -> tuple[Any, dict[str, Tensor | Shard]]:
    """The state as JSON can have it, and its tensors by name; TypeError for what is neither."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor | Shard] = {}

    def describe(value: Any, name: str) -> Any:
        if isinstance(value, (Tensor, Shard)):
            name = names.setdefault(id(value), name)  # tied weights have several
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[_plain(key), describe(inner, f"{name}[{key!r}]")] for key, inner in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [describe(inner, f"{name}[{at}]") for at, inner in enumerate(value)]}
        return _plain(value)

    return describe(state, ""), tensors


def _plain(value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain) not in PLAIN:
        raise TypeError(f"JSON has no {type(plain).__name__}")
    return plain


def rebuilt(description: Any, tensors: Mapping[str, Any]) -> Any:
    """The state of which this is the description, with these for its tensors."""
    if not isinstance(description, dict):
        return description
    ((kind, content),) = description.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: rebuilt(inner, tensors) for key, inner in content}
    built = [rebuilt(inner, tensors) for inner in content]
    return tuple(built) if kind == "tuple" else built


def open_shards(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The content of the checkpoint with this manifest, with StoredTensors, and the digests of its shards."""
    folder = shards_beside(path) / manifest["folder"]
    tensors = {
        name: StoredTensor(
            name,
            getattr(torch, about["dtype"]),
            tuple(about["shape"]),
            tuple((folder / file, first, last) for file, first, last in about["rows"]),
        )
        for name, about in manifest["tensors"].items()
    }
    shards = {folder / file: digest for file, digest in manifest["files"].items()}
    return {**rebuilt(manifest["content"], tensors), "shards": shards}


def problem_of(shard: Path, digest: str) -> str:
    """What is wrong with a file of a checkpoint; empty if nothing is."""
    try:
        is_whole = content_digest(shard) == digest
    except OSError as error:
        return f"is incomplete: {shard.name} of its shards cannot be read: {error.strerror}"
    return "" if is_whole else f"is damaged: {shard.name} of its shards does not match its digest"


class ShardWriter:
    """Writes this rank's part of each checkpoint, on a host that has all ranks."""

    def __init__(self, path: Path, environment: Environment):
        """A collective. path: of the checkpoint; rank 0's counts."""
        told: list[Any] = [path, uuid.uuid4().hex[:8]]
        distributed.broadcast_object_list(told)
        self._path, self._attempt = told
        self._rank, self._size = environment.rank, environment.world.size
        self._group = gloo_group(environment.world)

    def begin(self, content: dict[str, Any], device: torch.device) -> Callable[[], None]:
        """Copies this rank's tensors; what it returns writes the checkpoint, a collective for a thread of each rank,
        which raises OSError on rank 0 if any rank fails."""
        description, tensors = described(content)
        position = content["state"]["epoch"], content["state"]["step"]
        folder = shards_beside(self._path) / "-".join(map(str, (*position, self._attempt)))
        entries = {name: self._entry(tensor) for name, tensor in tensors.items()}
        manifest = {"folder": folder.name, "tensors": entries, "content": description}
        older = [other for other in folder.parent.glob("*") if other != folder]
        own = {name: self._own(tensor) for name, tensor in tensors.items()}
        mine = {name: tensor for name, tensor in own.items() if tensor is not None}
        file = folder / _file_of(self._rank)
        if device.type == "cpu":
            problem = _write(file, mine)
            return lambda: self._finish(manifest, file, problem, older)
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in mine.items()}
        return lambda: self._finish(manifest, file, _write(file, copied), older)

    def _entry(self, tensor: Tensor | Shard) -> dict[str, Any]:
        """What the manifest says of a tensor."""
        if isinstance(tensor, Shard):
            dtype, owners = tensor.rows.dtype, list(range(self._size))
            cut = [rows_of(tensor.shape[0], rank, self._size) for rank in owners]
        else:
            dtype, owners, cut = tensor.dtype, [0], [(0, tensor.shape[0] if tensor.ndim else 1)]
        rows = [(_file_of(rank), *part) for rank, part in zip(owners, cut, strict=True) if part[0] < part[1]]
        return {"dtype": str(dtype).removeprefix("torch."), "shape": list(tensor.shape), "rows": rows}

    def _own(self, tensor: Tensor | Shard) -> Tensor | None:
        """What this rank's file has of it: of what is not sharded rank 0's has all, as a copy: it may share memory with
        others, which safetensors refuses."""
        if isinstance(tensor, Shard):
            return tensor.rows.contiguous() if len(tensor.rows) else None
        return tensor.clone(memory_format=torch.contiguous_format) if self._rank == 0 else None

    def _finish(self, manifest: dict[str, Any], file: Path, problem: str, older: list[Path]) -> None:
        digest, problem = ("", problem) if problem else _sealed(file)
        told: list[Any] | None = None if self._rank else [None] * self._size
        try:
            distributed.gather_object((digest, problem), told, group=self._group)
        except RuntimeError as error:  # a rank is gone, of which training hears by itself
            raise OSError(errno.EPIPE, f"not all ranks wrote their shards: {str(error).splitlines()[0]}") from None
        if told is None:
            return
        if problems := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(told) if problem]:
            shutil.rmtree(file.parent, ignore_errors=True)
            raise OSError(errno.EIO, problems[0])
        files = {_file_of(rank): digest for rank, (digest, _) in enumerate(told)}
        write_manifest(self._path, {**manifest, "files": files})
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)


def _file_of(rank: int) -> str:
    return f"{rank}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> str:
    """Writes tensors to a file; returns what went wrong, if anything did: the others must hear of it."""
    from safetensors import SafetensorError  # an optional library
    from safetensors.torch import save_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
    except (OSError, SafetensorError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _sealed(file: Path) -> tuple[str, str]:
    """The digest of a file that is on the disk from now on, and what went wrong, if anything did."""
    try:
        with open(file, "rb") as written:
            sync(written)
        sync_folder(file.parent)
        return content_digest(file), ""
    except OSError as error:
        return "", str(error.strerror)
