"""A sharded checkpoint's manifest, which names the files that each rank has written. Standard library only.

The manifest is where other trainings have their checkpoint, ends with a checksum like that, and is replaced as a whole,
too: so whichever of them was written last is the checkpoint. Its shards are in a folder of their own beside it.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from flyte_ddp.whole_files import sync_folder, write_whole

DIGEST_BYTES = hashlib.sha256().digest_size


def shards_beside(path: Path) -> Path:
    """The folder with a folder of shards for each manifest that was, or is about to be, at this path."""
    return path.with_name(f"{path.name}-shards")


def models_beside(path: Path) -> Path:
    """The folder with the weights of the best evaluations so far, of a training with its checkpoint at this path."""
    return path.with_name(f"{path.name}-best")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest at this path; None if the checkpoint is a single file, or damaged. Raises OSError."""
    with open(path, "rb") as file:
        whole = b"{" + file.read() if file.read(1) == b"{" else b""
    content, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    try:
        manifest: dict[str, Any] = json.loads(content)
        names = [manifest["folder"], *manifest["files"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return manifest if all(Path(name).name == name != ".." for name in names) else None  # it may be another's


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the checkpoint at this path, whole or not at all; raises OSError."""
    content = json.dumps(manifest).encode()
    write_whole(path, content + hashlib.sha256(content).digest())
    sync_folder(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint at this path, if there is one, with its shards and models."""
    path.unlink(missing_ok=True)
    for folder in (shards_beside(path), models_beside(path)):
        shutil.rmtree(folder, ignore_errors=True)
