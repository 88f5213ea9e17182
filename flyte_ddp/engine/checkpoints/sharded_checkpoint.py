"""The reader of sharded trainings' checkpoints: files with rows, and a manifest that makes all of them the checkpoint.

Nothing in them is unpickled. The manifest has the state as JSON, without its tensors. Of a tensor it has type, shape,
and how many rows are in each file. So a rank of any other training of this recipe, sharded or not, reads what it needs
and nothing else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.sharding.sharded_state import Shard
from flyte_ddp.whole_files import content_digest

PLAIN = (str, int, float, bool, type(None))  # the plain types that JSON has


@dataclass(frozen=True)
class StoredTensor:
    """Rows of a tensor of a sharded checkpoint, in files.

    Attributes:
        name: the tensor's name in the files.
        shape: the shape of these rows; () for a number.
        files: the checkpoint's files, in the order of their rows.
        each: how many rows of the whole tensor a file has: the first ones in the first file, and so on.
        first: the first of these rows in the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    files: tuple[Path, ...]
    each: int
    first: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "StoredTensor":
        first, last, _ = rows.indices(len(self))
        return replace(self, shape=(last - first, *self.shape[1:]), first=self.first + first)

    def parts(self) -> Iterator[tuple[Path, int, int]]:
        """Yield each file that has some of these rows, or the number, with its first row and the one after its last."""
        count = len(self) if self.shape else 1
        for begin in range(self.first - self.first % self.each, self.first + count, self.each) if count else ():
            yield self.files[begin // self.each], begin, begin + self.each

    def read(self) -> Tensor:
        from safetensors import safe_open  # an optional library

        tensor = torch.empty(self.shape, dtype=self.dtype)
        for path, begin, end in self.parts():
            with safe_open(path, "pt") as file:
                if not self.shape:
                    return tensor.copy_(self._joined(file.get_tensor(self.name)))
                rows = slice(max(begin, self.first), min(end, self.first + len(self)))
                part = self._joined(file.get_slice(self.name)[rows.start - begin : rows.stop - begin])
                tensor[rows.start - self.first : rows.stop - self.first] = part
        return tensor

    def _joined(self, part: Tensor) -> Tensor:
        """Return complex numbers made from pairs of real ones.

        The pairs are copied: in the file they begin at a multiple of 8 bytes, and torch's kernels for complex numbers,
        which may need 16, would end the process.
        """
        return torch.view_as_complex(part.clone()) if self.dtype.is_complex and not part.is_complex() else part


def described(state: Any) -> tuple[Any, dict[str, Tensor | Shard]]:
    """Return the state as JSON can have it, and its tensors by name. Raises TypeError for anything else."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor | Shard] = {}

    def describe(value: Any, name: str) -> Any:
        if isinstance(value, (Tensor, Shard)):
            name = names.setdefault(id(value), name)  # tied weights have several names names
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
    """Return the state that a description stands for, with these tensors."""
    if not isinstance(description, dict):
        return description
    ((kind, content),) = description.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: rebuilt(inner, tensors) for key, inner in content}
    built = [rebuilt(inner, tensors) for inner in content]
    return tuple(built) if kind == "tuple" else built


def open_shards(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the checkpoint with this manifest and files in this folder.

    Its tensors are StoredTensors, and "shards" has the digest of each file.
    """
    files = tuple(folder / name for name in manifest["files"])
    tensors = {
        name: StoredTensor(name, getattr(torch, about["dtype"]), tuple(about["shape"]), files, about["each"])
        for name, about in manifest["tensors"].items()
    }
    shards = dict(zip(files, manifest["files"].values(), strict=True))
    return {**rebuilt(manifest["content"], tensors), "shards": shards}


def find_problem(shard: Path, digest: str) -> str:
    """Return what is wrong with a file of a checkpoint; empty if nothing is."""
    try:
        is_whole = content_digest(shard) == digest
    except OSError as error:
        return f"is incomplete: {shard.name} of its shards cannot be read: {error.strerror}"
    return "" if is_whole else f"is damaged: {shard.name} of its shards does not match its digest"
