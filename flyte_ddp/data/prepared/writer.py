"""The writer of prepared datasets. A folder appears whole or not at all; ranks only read it."""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.data.prepared.prepared import DESCRIPTION, FILES, SPLITS, verify
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.whole_files import sync_folder, synced_file, temporary_beside, writing_to


def write_prepared(
    directory: str | Path,
    name: str,
    classes: Sequence[str],
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
    passes_per_epoch: int = 1,
) -> DatasetDescription:
    """Write an image dataset to a folder, and return its description.

    The description has the mean and standard deviation of the training images. A dataset with the same content that is
    already there, intact, stays. Anything else at that path is removed, with all that is in it. Several processes may
    write the same dataset at once.

    Args:
        directory: the folder. It is created if it is missing.
        name: the name of the dataset.
        classes: the names of the classes.
        train_images: (N, C, H, W) uint8.
        train_labels: (N,) of any integer type, the index of each image's class in `classes`.
        test_images: (M, C, H, W) uint8, with the same C, H and W.
        test_labels: (M,), as train_labels.
        passes_per_epoch: how often an epoch goes over the training images.

    Raises:
        InputError: An array is not as described, or the disk is full or read-only.
    """
    arrays = dict(zip(FILES, (train_images, train_labels, test_images, test_labels), strict=True))
    _check_arrays(name, len(classes), arrays)
    mean, std = mean_and_std(pixel_counts(train_images))
    description = DatasetDescription(
        name=name,
        classes=tuple(classes),
        mean=mean,
        std=std,
        train_samples=len(train_images),
        test_samples=len(test_images),
        image_shape=tuple(int(size) for size in train_images.shape[1:]),  # type: ignore[arg-type]
        passes_per_epoch=passes_per_epoch,
    )
    return write_dataset(Path(directory), arrays, description)


def write_dataset(
    directory: Path, arrays: Mapping[str, np.ndarray], description: DatasetDescription
) -> DatasetDescription:
    """Write a dataset's arrays and description to a folder, which appears only when all is written.

    A dataset with the same content that is already there, intact, stays. Anything else at that path is removed, with
    all that is in it.

    Args:
        directory: the folder. Its parents are created.
        arrays: the arrays by file name, NAME.npy. One-dimensional arrays of integers are written as int64.
        description: the description, whose sha256 is replaced.

    Returns:
        The description with the SHA-256 of each file.

    Raises:
        InputError: The folder cannot be written to, or the disk is full.
    """
    with writing_to(directory.parent, "DDP_DATA_DIR"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(directory)
        try:
            temporary.mkdir()
            sha256 = {name: _write_array(temporary / name, array) for name, array in arrays.items()}
            description = dataclasses.replace(description, sha256=sha256)
            content = {**dataclasses.asdict(description), "digest": description.digest}
            with synced_file(temporary / DESCRIPTION) as file:
                file.write(json.dumps(content, indent=2).encode())
            _put_in_place(temporary, directory, description.digest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return description


def _check_arrays(name: str, classes: int, arrays: Mapping[str, np.ndarray]) -> None:
    sizes = arrays[FILES[0]].shape[1:]
    for split in SPLITS:
        images = arrays[f"{split}_images.npy"]
        labels = arrays[f"{split}_labels.npy"]
        if images.dtype != np.uint8 or images.ndim != 4 or not images.size or images.shape[1:] != sizes:
            raise InputError(
                f"{name}: {split} images must be uint8 of shape (N, C, H, W), C, H and W as in training, "
                f"got {images.dtype} {images.shape}"
            )
        if (
            labels.dtype.kind not in "iu"
            or labels.shape != images.shape[:1]
            or not np.isin(labels, np.arange(classes)).all()
        ):
            raise InputError(
                f"{name}: {split} labels must be integers of shape {images.shape[:1]} from 0 to {classes - 1}, "
                f"got {labels.dtype} {labels.shape} of the values {np.unique(labels)}"
            )


def pixel_counts(images: np.ndarray) -> np.ndarray:
    """Return histograms (C, 256) int64 of the values in each channel of images (N, C, H, W) uint8."""
    counts = np.zeros((images.shape[1], 256), np.int64)
    for block in np.array_split(images, max(1, images.nbytes // 2**23)):  # bincount takes 8 bytes per pixel
        for channel in range(len(counts)):
            counts[channel] += np.bincount(block[:, channel].ravel(), minlength=256)
    return counts


def mean_and_std(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, for pixels scaled from 0..255 to 0..1.

    The numbers are rounded, so that they are equal on every machine: to 4 decimals, or to more where the standard
    deviation would otherwise have fewer than 4 significant digits. A channel with a single value has a standard
    deviation of 1 instead of 0.

    Args:
        counts: (C, 256), how often each channel has each value.
    """
    means, stds = [], []
    for channel in counts:
        there = channel.nonzero()[0]  # a single value needs no sums, whose rounding would leave a deviation
        weights = channel[there] / channel.sum()
        mean = float(weights @ (there / 255))
        std = math.sqrt(float(weights @ (there / 255 - mean) ** 2)) if len(there) > 1 else 1.0
        decimals = max(4, 3 - math.floor(math.log10(std)))
        means.append(round(mean, decimals))
        stds.append(round(std, decimals))
    return tuple(means), tuple(stds)


def _write_array(path: Path, array: np.ndarray) -> str:
    """Write an array as a new .npy file, synced to disk, and return the file's SHA-256 in hex. Raises OSError.

    One-dimensional arrays of integers, which are labels, are written as int64.
    """
    array = np.ascontiguousarray(array, dtype=np.int64 if array.dtype.kind in "iu" and array.ndim == 1 else None)
    # np.save would report a full disk without saying why, and the bytes would have to be read again for the hash
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    digest = hashlib.sha256()
    with synced_file(path) as file:
        for piece in (header.getvalue(), array.data):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _put_in_place(temporary: Path, directory: Path, digest: str) -> None:
    """Rename the folder `temporary` to `directory`, and remove whatever was there.

    If the same dataset is there already, and intact, it stays, and `temporary` is left for the caller to remove.

    Args:
        temporary: the folder with the dataset.
        directory: the path that the dataset is to have.
        digest: the digest of this dataset's description, by which the same dataset is recognised.
    """
    sync_folder(directory.parent)
    with _locked(directory):
        if os.path.lexists(directory):
            with contextlib.suppress(DataError):
                if verify(directory).digest == digest:
                    return
            _remove(directory)
        os.rename(temporary, directory)
        sync_folder(directory.parent)


def discard(directory: Path) -> None:
    """Remove the dataset in a folder if it is damaged.

    All its files are read, while the folder's lock keeps other processes from writing it. An intact dataset stays, and
    a missing folder is left alone. Raises OSError if the folder cannot be removed.
    """
    with _locked(directory):
        try:
            verify(directory)
        except DataError:
            if os.path.lexists(directory):
                _remove(directory)


def _remove(directory: Path) -> None:
    discarded = temporary_beside(directory)
    os.rename(directory, discarded)  # renaming is atomic, and readers that have mapped the files keep them
    shutil.rmtree(discarded) if discarded.is_dir() else discarded.unlink()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a dataset's folder while the block runs, so that other processes wait to write or remove it.

    A context manager. It waits, without a limit, while another process holds the lock, which is a file beside the
    folder. The folder need not exist. On a file system without locks the block runs without one.
    """
    lock = FileLock(directory.with_name(f".{directory.name}.lock"), fallback_to_soft=False)
    with contextlib.suppress(OSError):  # not every network file system has locks; without one, the last writer wins
        lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:
            # The file is removed while its lock is held, so a waiting process sees that, and makes another file
            os.unlink(lock.lock_file)
            lock.release()
