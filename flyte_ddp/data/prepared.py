"""The one form of a prepared dataset, whatever its source: four .npy files and a dataset.json in one folder.

train_images.npy, test_images.npy: (N, C, H, W) uint8. A folder of image files has in their place
train_files.npy, test_files.npy: (N,) names as bytes, relative to the folder that the images stay in (image_files.py).
train_labels.npy, test_labels.npy: (N,) int64, which the loss takes as they are; they weigh little beside the images.
dataset.json: a DatasetDescription, with the SHA-256 of each file and of itself.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple, Union

import numpy as np

from flyte_ddp.data.description import DatasetDescription, FolderDescription, digest_of
from flyte_ddp.data.image_files import ImageFiles, read_access
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.storage import synced_file, temporary_beside, writing_to

FORMAT = 2
DESCRIPTION = "dataset.json"
SPLITS = ("train", "test")
FILES = tuple(f"{split}_{kind}.npy" for split in SPLITS for kind in ("images", "labels"))
FOLDER_FILES = tuple(f"{split}_{kind}.npy" for split in SPLITS for kind in ("files", "labels"))

PathLike = Union[str, Path]


def write_prepared(
    directory: PathLike,
    name: str,
    classes: Sequence[str],
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
    passes_per_epoch: int = 1,
) -> DatasetDescription:
    """Writes the dataset; the folder appears whole or not at all, and one that holds anything else is replaced.

    Images are (N, C, H, W) uint8, labels (N,) of any integer type from 0 to len(classes) - 1; InputError if not, or if
    the disk is full or read-only. Writers of the same dataset at the same time don't disturb each other.
    """
    arrays = dict(zip(FILES, (train_images, train_labels, test_images, test_labels), strict=True))
    _check_arrays(name, len(classes), arrays)
    mean, std = mean_and_std(pixel_counts(train_images))

    def describe(sha256: Mapping[str, str]) -> DatasetDescription:
        return DatasetDescription(
            format=FORMAT,
            name=name,
            classes=tuple(classes),
            mean=mean,
            std=std,
            train_samples=len(train_images),
            test_samples=len(test_images),
            image_shape=tuple(int(size) for size in train_images.shape[1:]),  # type: ignore[arg-type]
            passes_per_epoch=passes_per_epoch,
            sha256=sha256,
        )

    return write_dataset(Path(directory), arrays, describe)


def write_dataset(
    directory: Path, arrays: Mapping[str, np.ndarray], describe: Callable[[Mapping[str, str]], DatasetDescription]
) -> DatasetDescription:
    """Writes the arrays under their names and what describe makes of their SHA-256; see write_prepared."""
    with writing_to(directory.parent, "DDP_DATA_DIR"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(directory)
        try:
            temporary.mkdir()
            description = describe({name: _write_array(temporary / name, array) for name, array in arrays.items()})
            content = dataclasses.asdict(description)
            with synced_file(temporary / DESCRIPTION) as file:
                file.write(json.dumps({**content, "digest": description.digest}, indent=2).encode())
            _put_in_place(temporary, directory, description.digest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return description


def read_description(directory: PathLike) -> DatasetDescription:
    """Reads dataset.json and looks at the files' sizes and shapes, in milliseconds; DataError says what is wrong."""
    path = Path(directory) / DESCRIPTION
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise _damaged(path, _os_reason(error)) from None
    except (ValueError, RecursionError):
        raise _damaged(path, "broken JSON") from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise _damaged(path, f"of format {json.dumps(version)[:20]} where this version reads format {FORMAT}")
    if content.pop("digest", None) != digest_of(content):
        raise _damaged(path, "changed since it was written")
    try:
        kind = FolderDescription if "content_sha256" in content else DatasetDescription
        description = kind(**{key: _frozen(value) for key, value in content.items()})
        expected = _expected_arrays(description)
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, "incomplete") from None
    for filename, (shape, dtype) in expected.items():
        array = _open_array(Path(directory) / filename)
        if array.shape != shape or not np.issubdtype(array.dtype, dtype):
            raise _damaged(Path(directory) / filename, f"{array.dtype} {array.shape}, expected {dtype} {shape}")
    return description


def verify(directory: PathLike) -> DatasetDescription:
    """Reads the description and every byte of the files; DataError if any differs from what was written."""
    description = read_description(directory)
    for filename, expected in description.sha256.items():
        path = Path(directory) / filename
        try:
            found = _file_sha256(path)
        except OSError as error:
            raise _damaged(path, _os_reason(error)) from None
        if found != expected:
            raise _damaged(path, "changed since it was written (SHA-256 differs)")
    return description


def open_split(directory: PathLike, split: str) -> Tuple[np.ndarray, np.ndarray]:
    """Memory-maps images (N, C, H, W) uint8 and labels (N,) int64 of "train" or "test"; DataError if it can't.

    The maps are copy-on-write: all processes of a host share one copy, no write reaches the files, and
    torch.from_numpy takes them without its warning about read-only arrays.
    """
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    images, labels = (_open_array(Path(directory) / f"{split}_{kind}.npy") for kind in ("images", "labels"))
    return images, labels


def open_images(directory: PathLike, split: str) -> Tuple[Union[np.ndarray, ImageFiles], np.ndarray]:
    """What open_split gives; where the dataset is a folder of image files, images[index] decodes that file."""
    path = Path(directory) / f"{split}_files.npy"
    if not path.exists():
        return open_split(directory, split)
    names, labels = _open_array(path), _open_array(Path(directory) / f"{split}_labels.npy")
    return ImageFiles(names, read_description(directory).image_shape, read_access(Path(directory))), labels


def _check_arrays(name: str, classes: int, arrays: Mapping[str, np.ndarray]) -> None:
    for split in SPLITS:
        images, labels = arrays[f"{split}_images.npy"], arrays[f"{split}_labels.npy"]
        if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
            raise InputError(
                f"{name}: {split} images must be uint8 of shape (N, C, H, W), got {images.dtype} {images.shape}"
            )
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
            raise InputError(
                f"{name}: {split} labels must be integers of shape {images.shape[:1]}, "
                f"got {labels.dtype} {labels.shape}"
            )
        if labels.min() < 0 or labels.max() >= classes:
            raise InputError(
                f"{name}: {split} labels must be from 0 to {classes - 1}, as there are {classes} classes, "
                f"got {labels.min()} to {labels.max()}"
            )
    train, test = (arrays[f"{split}_images.npy"].shape[1:] for split in SPLITS)
    if train != test:
        raise InputError(f"{name}: train and test images must be of one shape (C, H, W), got {train} and {test}")


def pixel_counts(images: np.ndarray) -> np.ndarray:
    """How often each of the 256 values occurs in each channel of images (N, C, H, W) uint8: (C, 256) int64."""
    counts = np.zeros((images.shape[1], 256), np.int64)
    for block in np.array_split(images, max(1, images.nbytes // 2**23)):  # bincount takes 8 bytes a pixel
        for channel in range(len(counts)):
            counts[channel] += np.bincount(block[:, channel].ravel(), minlength=256)
    return counts


def mean_and_std(counts: np.ndarray) -> Tuple[Tuple[float, ...], Tuple[float, ...]]:
    """Per channel, from exact counts: the same digits on every machine."""
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    std = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(round(float(x), 4) for x in mean), tuple(round(float(x), 4) for x in std)


def _write_array(path: Path, array: np.ndarray) -> str:
    """Writes a .npy file (integers but images as int64) and returns its SHA-256.

    Not by np.save: it reports a full disk without saying why, and the bytes would have to be read again for the hash.
    """
    array = np.ascontiguousarray(array, dtype=np.int64 if array.dtype.kind in "iu" and array.ndim == 1 else None)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    digest = hashlib.sha256()
    with synced_file(path) as file:
        for piece in (header.getvalue(), array.data):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _put_in_place(temporary: Path, directory: Path, digest: str) -> None:
    """Renames, unless another writer has put the same dataset there; what else is there has to go."""
    from filelock import FileLock  # not at the top: ranks read what is prepared, and never write it

    parent = os.open(directory.parent, os.O_RDONLY)
    lock = FileLock(directory.with_name(f".{directory.name}.lock"), fallback_to_soft=False)
    try:
        os.fsync(parent)
        with contextlib.suppress(OSError):  # not every network file system has locks; without, the last one wins
            lock.acquire()
        if os.path.lexists(directory):
            with contextlib.suppress(DataError):
                if verify(directory).digest == digest:
                    return
            discarded = temporary_beside(directory)
            os.rename(directory, discarded)  # at once; readers that have it mapped keep it
            shutil.rmtree(discarded) if discarded.is_dir() else discarded.unlink()
        os.rename(temporary, directory)
        os.fsync(parent)
    finally:
        if lock.is_locked:
            os.unlink(
                lock.lock_file
            )  # while it is held: who has waited for it sees that it has gone, and makes another
            lock.release()
        os.close(parent)


def _open_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        size = array.offset + array.nbytes
    except OSError as error:
        raise _damaged(path, _os_reason(error)) from None
    except Exception:  # numpy raises half a dozen types for a header that makes no sense
        raise _damaged(path, "cut short, or not a .npy file") from None
    if path.stat().st_size != size:
        raise _damaged(path, f"{path.stat().st_size} bytes long, expected {size}")
    return array


def _expected_arrays(description: DatasetDescription) -> Dict[str, Tuple[Tuple[int, ...], Any]]:
    samples = {"train": description.train_samples, "test": description.test_samples}
    of_files = isinstance(description, FolderDescription)
    if set(description.sha256) != set(FOLDER_FILES if of_files else FILES) or len(description.image_shape) != 3:
        raise ValueError
    expected: Dict[str, Tuple[Tuple[int, ...], Any]] = {}
    for split in SPLITS:
        expected[f"{split}_labels.npy"] = (samples[split],), np.dtype(np.int64)
        if of_files:
            expected[f"{split}_files.npy"] = (samples[split],), np.dtype(np.bytes_)
        else:
            expected[f"{split}_images.npy"] = (samples[split], *description.image_shape), np.dtype(np.uint8)
    return expected


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _os_reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else str(error.strerror or error)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is {what}: delete the folder {path.parent} and run again")
