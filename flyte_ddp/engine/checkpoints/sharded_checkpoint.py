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
from flyte_ddp.errors import RecoverableError
from flyte_ddp.whole_files import content_digest

PLAIN = (str, int, float, bool, type(None))  # the plain types that JSON has


@dataclass(frozen=True)
class StoredTensor:
    """Rows of a tensor in the files of a sharded checkpoint, which read() reads. A slice of it is another StoredTensor.

    Attributes:
        name: the tensor's name in the files.
        shape: the shape of these rows; () for a number.
        files: the checkpoint's files, in the order of their rows.
        each: how many rows of the whole tensor a file has: the first ones in the first file, and so on.
        first: the index in the whole tensor of the first of these rows.
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
        """Yield (path, first, end) for each file that has some of this object's rows, in the order of the rows.

        The file has the rows from `first` to before `end` of the whole tensor, which may be more rows than this object
        has. The last `end` may lie beyond the tensor. A tensor without dimensions counts as one row.
        """
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
        """Return a part that was read from a file, in the tensor's dtype: pairs of real numbers become complex ones.

        The pairs are copied: in the file they begin at a multiple of 8 bytes, and torch's kernels for complex numbers,
        which may need 16, would end the process.
        """
        return torch.view_as_complex(part.clone()) if self.dtype.is_complex and not part.is_complex() else part


def describe_state(state: Any) -> tuple[Any, dict[str, Tensor | Shard]]:
    """Split a state into a description without tensors, which JSON can hold, and its tensors by name.

    Args:
        state: nested dicts, lists and tuples of tensors and plain values: texts, numbers, bool and None. NumPy's
            numbers become Python's.

    Returns:
        The description, from which rebuild_state() makes the state again, and the tensors by name, not copied. Tied
        weights share a name.

    Raises:
        TypeError: The state has a value, or a dict's key, of another type.
    """
    names: dict[int, str] = {}
    tensors: dict[str, Tensor | Shard] = {}

    def describe(value: Any, name: str) -> Any:
        if isinstance(value, (Tensor, Shard)):
            name = names.setdefault(id(value), name)
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


def rebuild_state(description: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild a state from its description by describe_state(), and return it.

    Args:
        description: the description.
        tensors: what to put in place of each tensor, by the tensor's name.
    """
    if not isinstance(description, dict):
        return description
    ((kind, content),) = description.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: rebuild_state(inner, tensors) for key, inner in content}
    built = [rebuild_state(inner, tensors) for inner in content]
    return tuple(built) if kind == "tuple" else built


def open_shards(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a sharded checkpoint with a StoredTensor in place of each tensor. No file is opened yet.

    The content also gets an entry "shards": a dict from the Path of each file to its SHA-256 in hex. The caller has to
    verify the files.

    Args:
        folder: the folder in which the files are, or will be.
        manifest: the checkpoint's manifest.
    """
    files = tuple(folder / name for name in manifest["files"])
    tensors = {
        name: StoredTensor(name, getattr(torch, about["dtype"]), tuple(about["shape"]), files, about["each"])
        for name, about in manifest["tensors"].items()
    }
    shards = dict(zip(files, manifest["files"].values(), strict=True))
    return {**rebuild_state(manifest["content"], tensors), "shards": shards}


def find_problem(shard: Path, digest: str) -> str:
    """Return what is wrong with a file of a sharded checkpoint, such as "is damaged: ..."; empty if nothing is.

    Args:
        shard: the file.
        digest: the SHA-256 in hex that the file must have.

    Raises:
        RecoverableError: The file is there, but cannot be read now.
    """
    try:
        is_whole = content_digest(shard) == digest
    except FileNotFoundError as error:
        return f"is incomplete: {shard.name} of its shards cannot be read: {error.strerror}"
    except OSError as error:
        raise unreadable(shard, error) from None
    return "" if is_whole else f"is damaged: {shard.name} of its shards does not match its digest"


def unreadable(file: Path, error: OSError) -> RecoverableError:
    """Return the error to raise where a checkpoint's file cannot be read: it may be good, and must not be replaced."""
    return RecoverableError(
        f"{file}, a file of the checkpoint, cannot be read: {error.strerror}: try again once its disk answers, or "
        "remove the file"
    )
