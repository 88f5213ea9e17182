"""Checkpoints: written whole or not at all, in one file or, of sharded networks, in one for each rank; verified before
anything in them is unpickled.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.checkpoints.sharded_checkpoint import described, open_shards, rebuilt
from flyte_ddp.engine.sharding.sharded_state import Shard, fill, with_room
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError, InputError, OtherTrainingError
from flyte_ddp.events import CheckpointRefused, Event
from flyte_ddp.manifest import DIGEST_BYTES, read_manifest, shards_beside
from flyte_ddp.model_files.weights import save
from flyte_ddp.recipe import CPU
from flyte_ddp.settings import RunOptions
from flyte_ddp.text import listed
from flyte_ddp.whole_files import sync, temporary_beside

FORMAT = 7


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a temporary file and rename it: path always holds the old or the new checkpoint. Raises OSError."""
    finish(write_draft(path, content), path)


def write_draft(path: Path, content: dict[str, Any], device: torch.device = CPU) -> Path:
    """Write the content to a temporary file beside path, one tensor after the other; finish makes it the checkpoint.

    Tensors may change once this has returned: the kernel has them, though perhaps not yet the disk. Raises OSError. A
    collective if any are sharded; device: of these.
    """
    draft = temporary_beside(path)
    content = {"format": FORMAT, **content}
    written = None
    try:
        with open(draft, "xb") as file:
            _save(with_room(content), file)
        written = draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        fill(written, content, device)
    return draft


def finish(draft: Path, path: Path) -> None:
    """Append the checksum to a draft, wait until it is on the disk, and rename it. Raises OSError."""
    try:
        with open(draft, "r+b") as file:
            file.write(_digest(file, draft.stat().st_size))
            sync(file)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_checkpoint(path: Path, identity: Mapping[str, Any], files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The content of a checkpoint; raises CheckpointError if it is damaged or of a training with another identity.

    files: the hashes of the user's files, of which the error names those that differ.

    Its tensors are mapped, not read: a copy of what is kept takes memory, and frees the file. Those of a sharded one
    are StoredTensors, and content["shards"] has the digests of its files, which are still to be verified.
    """
    try:
        with open(path, "rb") as file:
            digest = _digest(file, path.stat().st_size - DIGEST_BYTES)
            expected = file.read()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from None
    if digest != expected:
        raise CheckpointError("is damaged, or of an older version: its content does not match its checksum")
    content = _content(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        saved_format = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise OtherTrainingError(f"has format {saved_format}, this version reads {FORMAT}")
    if not all(isinstance(content.get(part), dict) for part in ("identity", "state")):
        raise CheckpointError("has no identity or no state")
    for (*_, name), saved, expected in differences(content["identity"], identity):
        which = _changed_files(content.get("files"), files) if name == "code" else ""
        raise OtherTrainingError(
            f"belongs to another training: its {name} was {saved!r}, now it is {expected!r}{which}"
        )
    return content


def _changed_files(saved: Any, ours: Mapping[str, str] | None) -> str:
    """Return which files differ, in brackets; empty if that is not known."""
    if not isinstance(saved, dict) or ours is None:
        return ""
    changed = sorted(file for file in {*saved, *ours} if saved.get(file) != ours.get(file))
    return f" ({listed(changed)} changed)" if changed else " (another version of torch or flyte_ddp)"


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Where an identity differs from ours, or from as much as is given of it: ("code",) or ("settings", "seed"), and
    both values.
    """

    def parts(identity: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
        settings = identity.get("settings")
        named = settings.items() if isinstance(settings, dict) else ()  # it may be another's
        rest: dict[tuple[str, ...], Any] = {(name,): value for name, value in identity.items() if name != "settings"}
        return {**rest, **{("settings", name): value for name, value in named}}

    saved_parts = parts(saved)
    yield from (
        (path, saved_parts.get(path), value) for path, value in parts(ours).items() if saved_parts.get(path) != value
    )


def refuse(
    error: CheckpointError, options: RunOptions, emit: Callable[[Event], None], output: Path | None = None
) -> None:
    """Says why training starts anew; raises InputError where the user has asked for this very checkpoint, or for the
    folder output, in which another training's would be lost.
    """
    if options.resume_from:
        raise InputError(f"RunOptions.resume_from: the checkpoint in {options.resume_from} {error}")
    if output and isinstance(error, OtherTrainingError):
        raise InputError(
            f"output must not be where another training is unfinished, got {output}: the checkpoint there {error}: "
            "give another output, drop that checkpoint by RunOptions(resume=False), or repeat the call that left it"
        )
    emit(CheckpointRefused(f"the checkpoint {error}"))


def checksum(path: Path) -> bytes:
    """The checksum that a checkpoint has; other content of the same length if it is none. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(-DIGEST_BYTES, os.SEEK_END)
        return file.read()


def read_same(path: Path, expected: bytes) -> dict[str, Any] | None:
    """The content of the checkpoint that another rank has verified, if it is at this path here, too."""
    try:
        return _content(path) if checksum(path) == expected else None
    except (OSError, CheckpointError):
        return None


def restore(state: TrainingState, saved: dict[str, Any]) -> None:
    """Load a checkpoint's state; raises CheckpointError if it does not fit, which leaves the state half loaded."""
    try:
        state.load_state_dict(saved)
    except (torch.AcceleratorError, torch.OutOfMemoryError):  # of this rank's device, not for what it was given
        raise
    except Exception as error:  # of many types, as the content may have any form
        message = " ".join(str(error).split())
        raise CheckpointError(f"does not fit this training: {type(error).__name__}: {message}") from None


def check_readable(state: dict[str, Any]) -> None:
    """Raise InputError if a checkpoint of this state could not be read again, for the type of something in it."""
    is_sharded = any(isinstance(leaf, Shard) for leaf in pytree.tree_leaves(state))
    _check_readable(pytree.tree_map_only((Tensor, Shard), lambda _: torch.empty(0), state), "", is_sharded)


def _check_readable(content: Any, where: str, is_sharded: bool) -> None:
    try:
        buffer = io.BytesIO()
        _save(content, buffer)
        buffer.seek(0)
        _load(buffer)
        if is_sharded:
            rebuilt(*described(content))
    except Exception:  # of many types, and about the whole: the part to blame is found by trying each
        parts = content if isinstance(content, dict) else dict(enumerate(content if isinstance(content, list) else ()))
        for key, part in parts.items():
            _check_readable(part, f"{where}[{key!r}]", is_sharded)
        raise InputError(
            f"a checkpoint cannot hold state{where}, of type {type(content).__name__}, because it could not be read "
            "again: make it a number, a string, a tensor, or a list or dict of these"
        ) from None


def _save(content: Any, file: IO[bytes]) -> None:
    """Numbers of NumPy become plain ones: to read them as they are, torch would have to trust the file."""
    save(pytree.tree_map_only(np.generic, np.generic.item, content), file, checksums=False)


def _content(path: Path) -> Any:
    """Return the content of a checkpoint that is whole, without reading its tensors."""
    try:
        manifest = read_manifest(path)
        return open_shards(shards_beside(path) / manifest["folder"], manifest) if manifest else _load(path, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # of many types, as the manifest may have any form
        raise CheckpointError(f"cannot be read: {type(error).__name__}: {error}") from None


def _load(file: Path | IO[bytes], mmap: bool = False) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as error:  # torch advises to trust the file
        match = re.search(r"GLOBAL (\S+)", str(error))
        kind = f" ({match[1]})" if match else ""
        raise CheckpointError(
            f"cannot be read: it has something else than tensors and plain values in it{kind}"
        ) from None
    except Exception as error:  # of many types, from pickle, zipfile and torch
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot be read: {type(error).__name__}: {first_line}") from None


def _digest(file: IO[bytes], count: int) -> bytes:
    """SHA-256 of the next count bytes, or as many as there are."""
    digest = hashlib.sha256()
    while piece := file.read(max(0, min(count, 2**20))):
        digest.update(piece)
        count -= len(piece)
    return digest.digest()
