"""Checkpoints, which are written whole or not at all, and verified before anything in them is unpickled.

A checkpoint is one file, or for sharded networks one file for each rank.
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

from flyte_ddp.engine.checkpoints.sharded_checkpoint import describe_state, open_shards, rebuild_state, unreadable
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

FORMAT = 9


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint of one file to the disk: path always holds the old or the new one. Raises OSError."""
    finish_draft(write_draft(path, content), path)


def write_draft(path: Path, content: dict[str, Any], device: torch.device = CPU) -> Path:
    """Write a checkpoint's content to a temporary file beside `path`.

    The caller may change the tensors at once, and then has to call finish_draft(), which waits for the disk.

    If the content has Shards, which are sharded tensors with one rank's rows, this is a collective. Rank 0 calls
    write_draft(). Each other rank calls fill(None, content, device), which sends its rows to rank 0.

    Args:
        path: where the checkpoint will be.
        content: what to write. The number of the format is added.
        device: the device that exchanges the rows of Shards.

    Returns:
        The temporary file.

    Raises:
        OSError: The file cannot be written. The temporary file is removed, and fill() returns on the other ranks.
    """
    draft = temporary_beside(path)
    content = {"format": FORMAT, **content}
    written = None
    try:
        try:
            with open(draft, "xb") as file:
                _save(with_room(content), file)
            written = draft
        finally:
            fill(written, content, device)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def finish_draft(draft: Path, path: Path) -> None:
    """Append the checksum to a file of write_draft(), wait until the file is on the disk, and rename it to `path`.

    Raises:
        OSError: A step fails. The draft is removed, and the earlier file at `path` stays as it was.
    """
    try:
        with open(draft, "r+b") as file:
            file.write(_digest(file, draft.stat().st_size))
            sync(file)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_checkpoint(path: Path, identity: Mapping[str, Any], files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Verify a checkpoint's checksum, format and identity, and return its content.

    Tensors are mapped from the file, not read into memory. A sharded checkpoint has several files and a manifest. Of
    these, only the manifest is read and verified: the tensors are StoredTensors, and the caller verifies their files.

    Args:
        path: the checkpoint: one file, or the manifest of several.
        identity: entries that the checkpoint's identity must have, with the same values.
        files: the hash of each file of the user's code, by name. With it, an error about other code names the files
            that have changed.

    Returns:
        A dict with "identity", "state" and all else that was written. For a sharded checkpoint, "shards" has the
        SHA-256 of each file in hex, by its path.

    Raises:
        OtherTrainingError: the checkpoint has another format, or is of a training with another identity.
        CheckpointError: the checkpoint is damaged.
        FileNotFoundError: there is no checkpoint.
        RecoverableError: the checkpoint cannot be read now, as where a disk does not answer.
    """
    try:
        with open(path, "rb") as file:
            digest = _digest(file, path.stat().st_size - DIGEST_BYTES)
            expected = file.read()
        if digest != expected:
            raise CheckpointError("is damaged, or of an older version: its content does not match its checksum")
        content = _content(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        saved_format = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise OtherTrainingError(f"has format {saved_format}, this version reads {FORMAT}")
    if not all(isinstance(content.get(part), dict) for part in ("identity", "state")):
        raise CheckpointError("has no identity or no state")
    for (*_, name), saved, expected in compare_identities(content["identity"], identity):
        which = _changed_files(content.get("files"), files) if name == "code" else ""
        raise OtherTrainingError(
            f"belongs to another training: its {name} was {saved!r}, now it is {expected!r}{which}"
        )
    return content


def _changed_files(saved: Any, ours: Mapping[str, str] | None) -> str:
    """Return a text for a message, such as " (a.py, b.py changed)", that says how the code differs from a checkpoint's.

    If no file differs, the text is " (another version of torch or flyte_ddp)". If `saved` or `ours` is unknown, the
    text is empty.

    Args:
        saved: the hash of each file, by name, as the checkpoint has it; anything but a dict counts as unknown.
        ours: the hash of each file of this training's code, by name; None is unknown.
    """
    if not isinstance(saved, dict) or ours is None:
        return ""
    changed = sorted(file for file in {*saved, *ours} if saved.get(file) != ours.get(file))
    return f" ({listed(changed)} changed)" if changed else " (another version of torch or flyte_ddp)"


def compare_identities(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield each entry in which two identities of trainings differ, as its path, its saved value and our value.

    A path is ("code",) or ("settings", "seed"), say. An entry that `saved` lacks is yielded with None; an entry that
    `ours` lacks is not compared.
    """

    def parts(identity: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
        settings = identity.get("settings")
        named = settings.items() if isinstance(settings, dict) else ()  # somebody else may have written the file
        rest: dict[tuple[str, ...], Any] = {(name,): value for name, value in identity.items() if name != "settings"}
        return {**rest, **{("settings", name): value for name, value in named}}

    saved_parts = parts(saved)
    yield from (
        (path, saved_parts.get(path), value) for path, value in parts(ours).items() if saved_parts.get(path) != value
    )


def refuse(
    error: CheckpointError, options: RunOptions, emit: Callable[[Event], None], output: Path | None = None
) -> None:
    """Emit CheckpointRefused, or raise InputError if the user wants this checkpoint.

    After the event, the caller has to start the training from the beginning.

    Args:
        error: why the checkpoint cannot be used.
        options: the options of the training.
        emit: emits an event.
        output: the folder of the checkpoint if it is the output folder of train(); None otherwise.

    Raises:
        InputError: options.resume_from is set, so it names this checkpoint; or the checkpoint is in `output` and
            belongs to another training, which would be lost.
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
    """Return the checksum at the end of a checkpoint, by which ranks tell whether they see the same file.

    The checksum isn't verified here. Raises OSError.
    """
    with open(path, "rb") as file:
        file.seek(-DIGEST_BYTES, os.SEEK_END)
        return file.read()


def read_same(path: Path, expected: bytes) -> dict[str, Any] | None:
    """Return the content of a checkpoint that another rank has verified, if this rank sees the same file.

    The content is not verified again. Tensors are mapped or, in a sharded checkpoint, StoredTensors.

    Args:
        path: the checkpoint.
        expected: the checksum that the other rank's file has.

    Returns:
        The content, or None if the file is missing, cannot be read, or has another checksum. No error is raised.
    """
    try:
        return _content(path) if checksum(path) == expected else None
    except (OSError, CheckpointError):
        return None


def restore(state: TrainingState, saved: dict[str, Any]) -> None:
    """Load a checkpoint's state, as copy_in_place() has returned it, into the training.

    Raises:
        CheckpointError: The saved state does not fit. The training's state is half loaded then.
        torch.AcceleratorError, torch.OutOfMemoryError: The device has failed.
    """
    try:
        state.load_state_dict(saved)
    except (torch.AcceleratorError, torch.OutOfMemoryError):  # the device has failed, whatever the content
        raise
    except Exception as error:  # the content may have any form, so the error may have any type
        message = " ".join(str(error).split())
        raise CheckpointError(f"does not fit this training: {type(error).__name__}: {message}") from None


def check_readable(state: dict[str, Any]) -> None:
    """Write this state to memory without its tensors, and raise InputError if it cannot be read again from there.

    The message names the part whose type is to blame. A state with Shards must also fit into a manifest.
    """
    is_sharded = any(isinstance(leaf, Shard) for leaf in pytree.tree_leaves(state))
    _check_readable(pytree.tree_map_only((Tensor, Shard), lambda _: torch.empty(0), state), "", is_sharded)


def _check_readable(content: Any, where: str, is_sharded: bool) -> None:
    try:
        buffer = io.BytesIO()
        _save(content, buffer)
        buffer.seek(0)
        _load(buffer)
        if is_sharded:
            rebuild_state(*describe_state(content))
    except Exception:  # the error is about the whole; trying each part finds the one to blame
        listed_parts = content if isinstance(content, list) else ()
        parts = content if isinstance(content, dict) else dict(enumerate(listed_parts))
        for key, part in parts.items():
            _check_readable(part, f"{where}[{key!r}]", is_sharded)
        raise InputError(
            f"a checkpoint cannot hold state{where}, of type {type(content).__name__}, because it could not be read "
            "again: make it a number, a string, a tensor, or a list or dict of these"
        ) from None


def _save(content: Any, file: IO[bytes]) -> None:
    """Save the content, with plain numbers in place of NumPy's. To read NumPy's, torch would have to trust the file."""
    save(pytree.tree_map_only(np.generic, np.generic.item, content), file, checksums=False)


def _content(path: Path) -> Any:
    """Return the content of a checkpoint, whose checksum the caller has verified.

    Tensors are not read yet: they are mapped from the file or, of a sharded checkpoint, StoredTensors.

    Raises:
        CheckpointError: The content has another form, although the checksum is right.
        OSError: The file cannot be read.
    """
    try:
        manifest = read_manifest(path)
        return open_shards(shards_beside(path) / manifest["folder"], manifest) if manifest else _load(path, mmap=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # the manifest may have any form, so the error may have any type
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
    except OSError:
        raise
    except Exception as error:  # pickle, zipfile and torch raise many types
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot be read: {type(error).__name__}: {first_line}") from None


def _digest(file: IO[bytes], count: int) -> bytes:
    """Read the next `count` bytes of a file, or as many as there are, and return their SHA-256."""
    digest = hashlib.sha256()
    while piece := file.read(max(0, min(count, 2**20))):
        digest.update(piece)
        count -= len(piece)
    return digest.digest()
