"""The manifest of a sharded checkpoint, which names the files that each rank has written. Standard library only.

The manifest has the path at which other trainings have their checkpoint file. Like that file, it ends with a checksum
and is replaced as a whole. So the checkpoint is whichever of the two was written last. The shards are in a folder
beside the manifest.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from flyte_ddp.whole_files import sync_folder, write_whole

DIGEST_BYTES = hashlib.sha256().digest_size


def shards_beside(path: Path) -> Path:
    """Return the folder of shards of the checkpoint at this path.

    It has a subfolder for each manifest written there.
    """
    return path.with_name(f"{path.name}-shards")


def models_beside(path: Path) -> Path:
    """Return the folder with the weights of the best evaluations of the training whose checkpoint is at this path."""
    return path.with_name(f"{path.name}-best")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read the manifest of the sharded checkpoint at this path.

    Returns:
        The manifest; None if the checkpoint is a single file, or if the manifest is damaged or names a file outside of
        its folder. The manifest has at least:

        - "folder": the name of a folder of shards in shards_beside(path).
        - "files": the names of the files in that folder. In a training's manifest, a dict: their SHA-256 by name.

    Raises:
        OSError: The file at this path cannot be read, or is not there.
    """
    with open(path, "rb") as file:
        whole = b"{" + file.read() if file.read(1) == b"{" else b""
    content, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    try:
        manifest: dict[str, Any] = json.loads(content)
        names = [*map(Path, [manifest["folder"], *manifest["files"]])]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    # Somebody else may have written the manifest, so its names must not lead out of the folder
    return manifest if all(name.name == str(name) != ".." for name in names) else None


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the checkpoint at this path by a manifest, whole or not at all, and wait for the disk. Raises OSError."""
    content = json.dumps(manifest).encode()
    write_whole(path, content + hashlib.sha256(content).digest())
    sync_folder(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint at this path, if there is one, with its shards and models."""
    path.unlink(missing_ok=True)
    for folder in (shards_beside(path), models_beside(path)):
        shutil.rmtree(folder, ignore_errors=True)
