"""Datasets by name: where the original files come from, and how they become prepared datasets."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flyte_ddp.data.prepared.prepared import verify
from flyte_ddp.data.prepared.writer import discard, write_prepared
from flyte_ddp.data.sources.download import Mirrors, Progress, mirror_from_environment
from flyte_ddp.data.sources.open_url import Opener, OpenStored
from flyte_ddp.errors import DataError, DownloadError, InputError
from flyte_ddp.whole_files import absolute, remove_leftovers, write_whole, writing_to

logger = logging.getLogger(__name__)

Ask = Callable[[list[str]], Mirrors]  # the argument has the URLs of folders


class Originals(NamedTuple):
    """A dataset as its source has it: images (N, C, H, W) uint8, labels (N,) integers."""

    classes: tuple[str, ...]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    passes_per_epoch: int = 1


# Folders of downloads and prepared datasets below the folder for data, in which a user may have other folders
OWN_FOLDERS = "", "prepared", "MNIST/raw", "FashionMNIST/raw", "CIFAR10", "CIFAR10/cifar-10-batches-py"


def data_dir() -> Path:
    """Return the absolute path of the folder for local data: DDP_DATA_DIR, or flyte-ddp in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    default = Path(cache if os.path.isabs(cache) else "~/.cache", "flyte-ddp")
    return absolute(os.environ.get("DDP_DATA_DIR") or default, "DDP_DATA_DIR")


def prepared_dir(name: str) -> Path:
    """Return the folder where the prepared dataset is, or will be."""
    if name not in SOURCES:
        raise InputError(f"dataset must be one of {', '.join(SOURCES)}, got {name!r}")
    return data_dir() / "prepared" / name


def discard_damaged(name: str) -> None:
    """Remove the prepared dataset of this name if it is damaged, and log a warning.

    All files of the dataset are read. Nothing happens if there is none, or if it is intact. Raises InputError if the
    name is unknown, or the dataset cannot be removed.
    """
    directory = prepared_dir(name)
    if directory.exists():
        try:
            verify(directory)
        except DataError as error:
            logger.warning("%s is prepared again: %s", name, error.problem)
            with writing_to(data_dir(), "DDP_DATA_DIR"):
                discard(directory)


def prepare(name: str, progress: Progress | None = None, open_stored: OpenStored | None = None) -> Path:
    """Prepare a dataset unless it is there and intact, and return its folder. Many processes may do so at once.

    A damaged dataset is removed first. Original files that are there with the right checksum are not downloaded again.
    Temporary files that killed processes have left in the folder for data are removed.

    Args:
        name: the name of the dataset.
        progress: is called with (file name, bytes so far, total bytes or None) while a file is downloaded.
        open_stored: open_stored(url) opens a file if DDP_DATA_MIRROR is in object storage, such as s3://bucket/folder.
            With None, such a mirror cannot be read.

    Raises:
        DownloadError: the original files cannot be downloaded.
        InputError: the name is unknown, DDP_DATA_MIRROR is wrong, or the folder cannot be written to.
    """
    directory = prepared_dir(name)
    discard_damaged(name)
    for folder in OWN_FOLDERS:
        remove_leftovers(data_dir() / folder)
    if directory.exists():
        return directory
    with writing_to(data_dir(), "DDP_DATA_DIR"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        originals = SOURCES[name](lambda urls: Mirrors(urls, progress, Opener(open_stored=open_stored)))
    write_prepared(directory, name, *originals)
    return directory


def _mnist(class_name: str, ask: Ask) -> Originals:
    """Download MNIST, or another dataset in its format, and return its classes, images and labels.

    Files that are in the folder for data with the right checksum are not downloaded again. Torchvision's class gives
    the mirrors, the checksums and the file format. The folder of DDP_DATA_MIRROR is tried before these mirrors.

    Args:
        class_name: the name of torchvision's class, such as "FashionMNIST".
        ask: ask(urls) returns Mirrors that try the folders at these URLs, in order.

    Raises:
        DownloadError: No mirror delivers a file.
        InputError: DDP_DATA_MIRROR is no URL of a folder, or the folder for data cannot be written to.
    """
    mirror = mirror_from_environment()
    public, resources = _find_downloads(class_name)
    # MNIST and Fashion-MNIST have the same file names, so torchvision's layout, with a folder for each, comes first
    own = [f"{mirror.rstrip('/')}/{class_name}/raw", mirror] if mirror else []
    mirrors = ask([*own, *public])
    raw = data_dir() / class_name / "raw"
    train, test = _unpacked(class_name, f"{class_name}/raw", [mirrors.fetch(*file, raw) for file in resources])
    return Originals(
        tuple(train.classes),
        train.data.numpy()[:, None],
        train.targets.numpy(),
        test.data.numpy()[:, None],
        test.targets.numpy(),
    )


def _find_downloads(class_name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the URLs of folders that have the files of a torchvision dataset, and the (name, MD5) of each file.

    The answer is cached in a file for each version of torchvision, because importing torchvision takes seconds.
    """
    path = data_dir() / class_name / f"torchvision-{version('torchvision')}.json"
    if not path.exists():
        from torchvision import datasets

        known = getattr(datasets, class_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([known.mirrors, known.resources]).encode())
    mirrors, resources = json.loads(path.read_bytes())
    return mirrors, resources


def _unpacked(class_name: str, below: str, archives: Sequence[Path]) -> list[Any]:
    """Unpack archives to a temporary folder, and return torchvision's [training, test] data sets of a class, in memory.

    Args:
        class_name: the name of torchvision's class.
        below: the folder below the class's root where the class looks for the unpacked files; "" for the root itself.
        archives: the archives.
    """
    from torchvision import datasets
    from torchvision.datasets.utils import extract_archive

    # torchvision would trust files that are already unpacked
    with tempfile.TemporaryDirectory(dir=data_dir(), prefix=".unpack.", suffix=".partial") as root:
        Path(root, below).mkdir(parents=True, exist_ok=True)
        for archive in archives:
            extract_archive(archive, Path(root, below))
        return [getattr(datasets, class_name)(root, train=is_train) for is_train in (True, False)]


def _cifar10(ask: Ask) -> Originals:
    """Download CIFAR-10 unless it is in the folder for data, and return its classes, images and labels.

    The function tries these, in order: unpacked files in the folder for data, unpacked files in DDP_DATA_MIRROR, the
    archive in DDP_DATA_MIRROR, and the archive at the public address.

    Args:
        ask: ask(urls) returns Mirrors that try the folders at these URLs, in order.

    Raises:
        DownloadError: Nobody delivered the archive.
        InputError: DDP_DATA_MIRROR is no URL of a folder, or the folder for data cannot be written to.
    """
    from torchvision.datasets import CIFAR10

    mirror = mirror_from_environment()
    root = data_dir() / "CIFAR10"
    own = [f"{mirror.rstrip('/')}/CIFAR10", mirror.rstrip("/")] if mirror else []
    public, archive = CIFAR10.url.rsplit("/", 1)
    try:
        folders = ask([f"{folder}/{CIFAR10.base_folder}" for folder in own])
        meta = CIFAR10.meta["filename"], CIFAR10.meta["md5"]
        for name, md5 in (*CIFAR10.train_list, *CIFAR10.test_list, meta):
            folders.fetch(name, md5, root / CIFAR10.base_folder)
        train, test = (CIFAR10(root, train=is_train) for is_train in (True, False))
    except DownloadError:
        train, test = _unpacked("CIFAR10", "", [ask([*own, public]).fetch(archive, CIFAR10.tgz_md5, root)])
    images, test_images = (np.ascontiguousarray(split.data.transpose(0, 3, 1, 2)) for split in (train, test))
    return Originals(tuple(train.classes), images, np.array(train.targets), test_images, np.array(test.targets))


def _digits(ask: Ask) -> Originals:
    """Return scikit-learn's 1,797 handwritten digits (UCI optdigits, test part), which need no download.

    Every sixth image of each class is for testing, 296 in all. An epoch goes over the other 1,501 eight times.

    The 8 x 8 images are enlarged to 24 x 24 and padded to 28 x 28.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target
    images = _enlarge(digits.images.astype(np.int64))  # of the sizes tried, the tutorial's network learns this one best
    within_class = np.zeros(len(labels), np.int64)
    for label in range(10):
        within_class[labels == label] = np.arange((labels == label).sum())
    test = within_class % 6 == 5  # the sixth of each class: a random generator's numbers could change
    names = tuple(digits.target_names.astype(str))
    # With 8 passes an epoch has 94 steps, and the default recipe needs only two epochs: benchmarks/stability.py
    return Originals(names, images[~test], labels[~test], images[test], labels[test], passes_per_epoch=8)


def _enlarge(images: np.ndarray) -> np.ndarray:
    """Enlarge images (N, 8, 8) int64 of values from 0 to 16 to (N, 1, 28, 28) uint8.

    They are enlarged to 24 x 24 bilinearly, by integer arithmetic with the same bits everywhere, and padded by 2.
    """
    thirds = np.clip(np.arange(24) - 1, 0, 21)  # the centres of the new pixels, in thirds of a source pixel
    left, part = np.divmod(thirds, 3)
    weights = np.zeros((24, 8), np.int64)
    weights[np.arange(24), left] += 3 - part
    weights[np.arange(24), np.minimum(left + 1, 7)] += part
    ninths = weights @ images @ weights.T
    pixels = ((ninths * 255 + 72) // 144).astype(np.uint8)  # 144 = 16 * 9
    return np.pad(pixels, ((0, 0), (2, 2), (2, 2)))[:, None]


SOURCES: dict[str, Callable[[Ask], Originals]] = {
    "mnist": partial(_mnist, "MNIST"),
    "fashion_mnist": partial(_mnist, "FashionMNIST"),
    "cifar10": _cifar10,
    "digits": _digits,
}
