"""The way from a folder of image files to what training reads, as Flyte tasks."""

import os
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from flytekit import Cache, HashMethod, task
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.code.code_version import code_version
from flyte_ddp.data.image_files import link_images
from flyte_ddp.data.prepared.prepared import SPLITS, open_split, read_description
from flyte_ddp.data.sources.datasets import data_dir, prepare
from flyte_ddp.data.sources.image_index import index_folder, stamp_images, verify_images, write_folder
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.flyte1.data import get_url, hash_folder
from flyte_ddp.flyte1.outputs import output_folder
from flyte_ddp.flyte1.platform import is_local, working_folder
from flyte_ddp.flyte1.prepare import PreparedDataset, forget_lost_results
from flyte_ddp.flyte1.resources import preparation_resources
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.report.console import say
from flyte_ddp.whole_files import absolute, writing_to


class FoundImages(NamedTuple):
    """A folder of images that was found.

    Attributes:
        folder: the folder of the image files.
        stamp: the digest of their names, sizes and times; empty for images that come with the image of the pods.
    """

    folder: Annotated[FlyteDirectory, HashMethod(get_url)]
    stamp: str


@task(**preparation_resources())
@platform_errors(platform)
def find_images(folder: str, backend: str = "auto", nproc: int = 0, batch_size: int = 1) -> FoundImages:
    """Return the folder of images to train on, and a digest of its files' names, sizes and times; a task, never cached.

    A local run first checks that this machine can run the training. If the images are on this machine, a local run also
    drops cached results of tasks whose output files are gone.

    Args:
        folder: a path or URL. A cluster needs a URL. If empty, scikit-learn's digits are written to this machine as PNG
            files; on a cluster, their digest is empty.
        backend: the backend of the training, for the check.
        nproc: the number of ranks, for the check.
        batch_size: the batch size, for the check.

    Raises:
        InputError: A folder on this machine has no images, or one in a storage no files; a cluster was given a path; or
            this machine cannot run the training.
    """
    if is_local():
        choose_world(backend, nproc, batch_size)
    if FileAccessProvider.is_remote(folder):
        stored = FlyteDirectory.from_source(folder)
        return FoundImages(stored, hash_folder(stored))
    if folder and not is_local():
        raise InputError(f"folder must be where the cluster can read it (such as s3://…), got {folder}: upload it")
    path = absolute(folder, "folder") if folder else digit_images()
    if not is_local():
        return FoundImages(FlyteDirectory(str(path)), "")
    forget_lost_results()
    return FoundImages(FlyteDirectory(str(path), remote_directory=False), stamp_images(path))


@task(
    cache=Cache(policies=CodeVersion(code_version("flyte_ddp.data.sources.image_index"), ["pillow"]), serialize=True),
    retries=3,
    **preparation_resources(),
)
@platform_errors(platform)
def index_images(folder: FlyteDirectory, stamp: str, images: ImageSettings) -> PreparedDataset:
    """Read every image once, and return a folder with an index of the images: names, labels and digest, but no pixels.

    It is a Flyte task, which is cached. Unreadable images are left out, and their number is printed.

    Args:
        folder: the images, which are downloaded if they are in a storage.
        stamp: the digest that find_images returned. If empty, the folder is not compared with it.
        images: the settings of the images.

    Raises:
        ReportedError: The folder has changed since find_images read it.
        InputError: Too many files cannot be read, or too few images or classes are left.
    """
    name = Path(get_url(folder)).name
    is_stored = FileAccessProvider.is_remote(get_url(folder))
    path = Path(folder.download())
    index = index_folder(path, name, images, say)
    if stamp and stamp != (hash_folder(folder) if is_stored else stamp_images(path)):
        raise ReportedError(
            f"{get_url(folder)} has changed while its images were read: run again, and leave it as it is"
        )
    return output_folder(index)


def digit_images() -> Path:
    """Return the folder of scikit-learn's 1,797 digits as PNG files, after writing the files if the folder is missing.

    Each call prints that the run uses these images because no folder was given.

    Raises:
        InputError: the folder cannot be written.
    """
    folder = data_dir() / "digit_images"
    say(f"No folder was given, so this run reads scikit-learn's 1,797 handwritten digits, as PNG files in {folder}.")
    if not folder.exists():
        splits = [open_split(prepare("digits"), split) for split in SPLITS]
        images, labels = (np.concatenate(arrays) for arrays in zip(*splits, strict=True))
        with writing_to(folder, "DDP_DATA_DIR"):
            write_folder(folder, read_description(prepare("digits")).classes, images, labels)
    return folder


def attach(index: FlyteDirectory, folder: FlyteDirectory) -> FlyteDirectory:
    """Return a folder for the ranks, whose download fills it with links to the index's files and to the images.

    This call only creates the folder, empty, in the working folder. The index and the images are downloaded when the
    returned folder is. In a pod, that download also reads every image and compares it with the index; a local run does
    not.

    Raises:
        DataError: Not from this call, but from the download in a pod: an image is missing, or its content is not what
            was indexed.
    """
    path = Path(tempfile.mkdtemp(dir=working_folder(), prefix="images-"))

    def fill() -> None:
        for file in Path(index.download()).iterdir():
            os.symlink(file, path / file.name)
        images = Path(folder.download())
        if not is_local():  # a pod's copy of the images is newer than the index
            verify_images(path, images)
        link_images(path, images)

    return FlyteDirectory(str(path), downloader=fill)
