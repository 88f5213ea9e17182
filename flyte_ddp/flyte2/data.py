"""Files and folders of Flyte 2, between its storage and this machine; as inputs of tasks, cached by their content."""

import hashlib
from pathlib import Path

from flyte import storage
from flyte.io import Dir, File

from flyte_ddp.errors import DownloadError
from flyte_ddp.flyte2 import platform
from flyte_ddp.report.article import document


def downloaded(data: File | Dir | None, to: str | None = None) -> Path | None:
    """Where it is, or a copy, in any case one if its place is named. Raises DownloadError, which is worth another
    attempt."""
    if data is None:
        return None
    try:
        return Path(data.download_sync(to))
    except Exception as error:  # each storage has its own
        raise DownloadError(f"{data.path} cannot be downloaded: {type(error).__name__}: {error}") from None


def output_file(path: Path) -> File:
    """A local run's file stays where it is."""
    return File.from_local_sync(str(path))


def output_page(folder: Path, title: str, fragment: str) -> File:
    """A page as an HTML file of its own in the folder, and as the task's report."""
    path = folder / "report.html"
    path.write_text(document(title, fragment), encoding="utf-8")
    platform.publisher(title)(fragment)
    return output_file(path)


def output_folder(path: Path, url: str = "", digest: str | None = None) -> Dir:
    """url: where it belongs; empty leaves it to Flyte. digest: of its content, as key of the caches."""
    return Dir.from_local_sync(str(path), url or None, dir_cache_key=digest)


def by_content(file: File | None) -> File | None:
    """The same file, a model_state or checkpoint to start from, where it is; its content is the cache key."""
    if file is None:
        return None
    digest = hashlib.sha256()
    with file.open_sync("rb") as content:
        while piece := bytes(content.read(2**20)):
            digest.update(piece)
    return File(path=file.path, hash=digest.hexdigest())


def folder_by_content(folder: Dir) -> Dir:
    """The same folder, where it is; its cache key changes when a file is added, removed or written to: a hash of names,
    sizes, times and other metadata."""
    files = storage.get_underlying_filesystem(path=folder.path)
    found = {name: str(details) for name, details in files.find(folder.path, detail=True).items()}
    return Dir(path=folder.path, hash=hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest())
