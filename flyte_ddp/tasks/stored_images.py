"""Folders of image files, local or in Flyte's storage: their content, and the files of one shard."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from fsspec.core import strip_protocol


def list_files(folder: FlyteDirectory) -> dict[str, str]:
    """Each file's name below the folder, sorted, with details that change when the file does; without hidden files."""
    source, storage = _open(folder)
    root = str(strip_protocol(source)).rstrip("/")
    found = {path[len(root) + 1 :]: str(details) for path, details in storage.find(root, detail=True).items()}
    return {name: found[name] for name in sorted(found) if not any(part[0] == "." for part in name.split("/"))}


def fetch(folder: FlyteDirectory, names: Sequence[str], into: Path) -> list[tuple[str, str]]:
    """Each name with the path of its file on this machine: where it is, or a copy in the existing folder into."""
    source, storage = _open(folder)
    if not FileAccessProvider.is_remote(source):
        return [(name, str(Path(source, name))) for name in names]
    copies = [str(into / f"{number}{Path(name).suffix}") for number, name in enumerate(names)]
    storage.get([f"{source.rstrip('/')}/{name}" for name in names], copies)
    return list(zip(names, copies, strict=True))


def describe_file(file: FlyteFile) -> str:
    """Details of the file that change when it does."""
    source, storage = _open(file)
    return str(storage.info(source))


def _open(folder: FlyteDirectory | FlyteFile) -> tuple[str, Any]:
    source = str(folder.remote_source or folder.path)
    return source, FlyteContextManager.current_context().file_access.get_filesystem_for_path(source)
