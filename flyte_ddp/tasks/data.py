"""A user's own data and weights as inputs of a training, cached by content; Flyte's own cache key is the path.

@workflow
def flowers_wf(folder: FlyteDirectory, settings: Settings = Settings(), ...) -> RecipeOutputs:
    return train_flowers(settings=settings, data=folder_by_content(folder=folder), ...)
"""

import hashlib
import json
from typing import Annotated

from flytekit import HashMethod, task
from flytekit.core.data_persistence import get_fsspec_storage_options
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset
from fsspec.utils import get_protocol

from flyte_ddp.data.description import StoredData
from flyte_ddp.data.stored import stored_data
from flyte_ddp.tasks.execution import is_local
from flyte_ddp.tasks.init import in_place, of_content
from flyte_ddp.tasks.resources import small_resources
from flyte_ddp.tasks.stored_images import describe_file, list_files


def of_folder(folder: FlyteDirectory) -> str:
    """A hash that changes when a file is added, removed or written to; of names, sizes, times and other metadata."""
    return hashlib.sha256(json.dumps(list_files(folder)).encode()).hexdigest()


def of_file(file: FlyteFile) -> str:
    return hashlib.sha256(describe_file(file).encode()).hexdigest()


FolderByContent = Annotated[FlyteDirectory, HashMethod(of_folder)]
FileByContent = Annotated[FlyteFile, HashMethod(of_file)]
WeightsByContent = Annotated[FlyteFile, HashMethod(of_content)]


def stream(given: FlyteFile | FlyteDirectory | StructuredDataset) -> StoredData:
    """The input as data that are read where they are, for RecipeTraining.run: the recipe's data_path is its URL.

    What a checkpoint belongs to follows the index of its blocks, or its files' names, sizes and ETags. For a cache key
    that does, too, give the task folder_by_content(folder=...).
    """
    if isinstance(given, StructuredDataset):
        url = str(given.literal.uri if given.literal else given.uri)
    else:
        url = str(given.remote_source or given.path)
    protocol = get_protocol(url)
    return stored_data(url, {} if protocol == "file" else {protocol: get_fsspec_storage_options(protocol)})


@task(**small_resources())
def folder_by_content(folder: FlyteDirectory) -> FolderByContent:
    """Returns the same folder, where it is; looks at it in each run, never cached."""
    url = str(folder.remote_source or folder.path)
    return FlyteDirectory(url, remote_directory=False) if is_local() else FlyteDirectory.from_source(url)


@task(**small_resources())
def file_by_content(file: FlyteFile) -> FileByContent:
    """Returns the same file, where it is; looks at it in each run, never cached."""
    return in_place(file)


@task(**small_resources())
def weights_by_content(file: FlyteFile) -> WeightsByContent:
    """Returns the same file, a model_state or checkpoint to start from, where it is; its content is the cache key."""
    return in_place(file)
