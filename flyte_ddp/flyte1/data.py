"""Files and folders as inputs, cached by content. Flyte's own cache key is the path.

@workflow
def flowers_wf(folder: FlyteDirectory, settings: Settings = Settings(), ...) -> RecipeOutputs:
    return train_flowers(settings=settings, data=folder_by_content(folder=folder), ...)
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flytekit import Cache, HashMethod, task
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset
from fsspec.utils import get_protocol

from flyte_ddp.attempt import platform_storage
from flyte_ddp.code.code_version import code_version
from flyte_ddp.data.description import StoredData
from flyte_ddp.data.remote_files import stored_data, use_storage_options
from flyte_ddp.errors import DownloadError
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion, OnClustersOnly
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.resources import small_resources
from flyte_ddp.whole_files import stream_digest

# --- where they are ---


def get_url(file_or_folder: FlyteFile | FlyteDirectory) -> str:
    """Return the path or URL that an input comes from. A copy on this machine is in another place in each pod."""
    return str(file_or_folder.remote_source or file_or_folder.path)


def downloaded(file_or_folder: FlyteFile | FlyteDirectory | None) -> Path | None:
    """Return the path of a copy on this machine, or of the original if it is here; None for None."""
    return None if file_or_folder is None else Path(file_or_folder.download())


def downloaded_once(file_or_folder: FlyteFile | FlyteDirectory | None) -> Path | None:
    """Download a file or folder once per host, and return the path of the download, which all ranks of the host share.

    The first process to call it downloads, while the others wait. The download goes to the folder for temporary files,
    under a hash of the URL. It is not repeated, even if the original changes. A path of this host is returned as it is,
    and None for None. Errors of the download are raised, and the next call tries again.
    """
    if file_or_folder is None:
        return None
    url = get_url(file_or_folder)
    is_folder = isinstance(file_or_folder, FlyteDirectory)
    download = partial(platform.storage().get_data, url, is_multipart=is_folder)
    return platform_storage.download_once(url, "" if is_folder else Path(url).name, download)


def stream(data: FlyteFile | FlyteDirectory | StructuredDataset) -> StoredData:
    """Return a reference by which ranks read the input where it is stored. Pass the reference to RecipeTraining.run.

    The recipe's data_path is the URL or path of the data. Nothing is downloaded, except the index of a folder of
    blocks. The reference has a digest of that index, or else of the files' names, sizes and times. A checkpoint is only
    valid for data with the same digest. If the cache key is to follow the data, too, give the task
    folder_by_content(folder=...).

    fsspec keeps Flyte's settings of that storage for the rest of this process.

    Raises:
        InputError: There are no data.
        DataError: An index may not be read.
        DownloadError: The storage fails.
    """
    url = _url_of_table(data) if isinstance(data, StructuredDataset) else get_url(data)
    return stored_data(url, _storage_options(url))


def _url_of_table(data: StructuredDataset) -> str:
    return str(data.literal.uri if data.literal else data.uri)


def new_folder() -> FlyteDirectory:
    """Return a new folder in Flyte's storage, for a task to write to and to return.

    write_blocks(f"{folder.path}/train", ...) can write to the folder, so the pod's disk need not hold the data. fsspec
    keeps Flyte's settings of that storage for the rest of this process.
    """
    folder = FlyteDirectory.new_remote()
    use_storage_options(_storage_options(str(folder.path)))
    return folder


def _storage_options(url: str) -> dict[str, dict[str, Any]]:
    """Return Flyte's settings for the URL's storage, as use_storage_options wants them."""
    protocol = get_protocol(url)
    return {} if protocol == "file" else {protocol: platform.storage_options(protocol)}


def in_place(file: FlyteFile) -> FlyteFile:
    """Return the file as a task's output that keeps its URL: nothing is copied."""
    return FlyteFile(get_url(file), remote_path=False) if is_local() else FlyteFile.from_source(get_url(file))


def list_files(folder: FlyteDirectory) -> dict[str, str]:
    """Return each file's name below the folder, sorted, with a text that changes when the file does.

    Skips hidden files.
    """
    return platform_storage.list_files(platform, get_url(folder))


def fetch(folder: FlyteDirectory, names: Sequence[str], into: Path) -> list[tuple[str, str]]:
    """Return each name with the path of its file on this machine, in the order of the names.

    If the folder is in a storage, the files are downloaded first. Files on this machine stay where they are, and may be
    missing.

    Args:
        folder: the folder.
        names: the files' names below the folder.
        into: an existing folder for the copies, which are named 0, 1, … with the suffixes of the files.

    Raises:
        FileNotFoundError: The storage lacks a file.
        DownloadError: The storage fails in another way, which is worth another attempt.
    """
    source = get_url(folder)
    if not FileAccessProvider.is_remote(source):
        return [(name, str(Path(source, name))) for name in names]
    copies = [str(into / f"{number}{Path(name).suffix}") for number, name in enumerate(names)]
    files, root = platform_storage.files_at(platform, source)
    try:
        files.get([f"{root}/{name}" for name in names], copies)
    except FileNotFoundError:
        raise
    except Exception as error:  # each storage has errors of its own
        raise DownloadError(f"{source} cannot be downloaded: {type(error).__name__}: {error}") from None
    return list(zip(names, copies, strict=True))


# --- their content ---


def hash_folder(folder: FlyteDirectory) -> str:
    """Return a digest that changes when a file of the folder is added, removed or written to.

    It is made of names, sizes, times and other metadata; no file is read.

    Raises:
        InputError: `folder` is a file, has no files, or is not there.
        DataError: The folder may not be read.
        DownloadError: The storage fails.
    """
    return platform_storage.folder_digest(platform, get_url(folder))


def hash_file(file: FlyteFile) -> str:
    """Return a digest of a file's size, times and other metadata, which changes when the file is written to.

    The content is not read. Raises FileNotFoundError, and the storage's own errors.
    """
    files, path = platform_storage.files_at(platform, get_url(file))
    return hashlib.sha256(str(files.info(path)).encode()).hexdigest()


def hash_content(file: FlyteFile) -> str:
    """Return the SHA-256 of the content, read from where the file is."""
    with FlyteFile(get_url(file)).open("rb") as content:
        return stream_digest(content)


def hash_init(init: FlyteFile | None) -> str | None:
    """Return the SHA-256 of the content; None for None, whose cache key is that of a training without this input."""
    return None if init is None else hash_content(init)


FolderByContent = Annotated[FlyteDirectory, HashMethod(hash_folder)]
FileByContent = Annotated[FlyteFile, HashMethod(hash_file)]
WeightsByContent = Annotated[FlyteFile, HashMethod(hash_content)]
InitByContent = Annotated[FlyteFile | None, HashMethod(hash_init)]


@task(**small_resources())
def folder_by_content(folder: FlyteDirectory) -> FolderByContent:
    """Return the same folder, where it is. Each run looks at the folder; the result is never cached."""
    url = get_url(folder)
    return FlyteDirectory(url, remote_directory=False) if is_local() else FlyteDirectory.from_source(url)


@task(**small_resources())
def file_by_content(file: FlyteFile) -> FileByContent:
    """Return the same file, where it is. Each run looks at the file; the result is never cached."""
    return in_place(file)


@task(**small_resources())
def weights_by_content(file: FlyteFile) -> WeightsByContent:
    """Return the same file, a model_state or checkpoint to start from, where it is. Its content is the cache key."""
    return in_place(file)


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=CodeVersion(code_version(__name__), ())),
    **small_resources(),
)
def init_by_content(init: FlyteFile | None) -> InitByContent:
    """Return the same file, a model_state or checkpoint, where it is.

    A cluster reads each path only once, so that a cached training starts no pod: other weights need another path.
    """
    return None if init is None else in_place(init)
