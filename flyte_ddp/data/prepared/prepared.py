"""The reader of prepared datasets, which are four .npy files and a dataset.json in one folder. writer.py writes them.

train_images.npy, test_images.npy: (N, C, H, W) uint8; or, for a folder of image files,
train_files.npy, test_files.npy: (N,) names as bytes, relative to the folder that the images stay in (image_files.py).
train_labels.npy, test_labels.npy: (N,) int64, as the loss takes them; they are small compared with the images.
dataset.json: a DatasetDescription, with the SHA-256 of each file and of itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.data.description import FORMAT, DatasetDescription, FolderDescription, compute_digest
from flyte_ddp.data.image_files import IMAGES, ImageFiles
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.whole_files import content_digest

DESCRIPTION = "dataset.json"
SPLITS = ("train", "test")
FILES = ("train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy")

PathLike = str | Path


def read_description(directory: PathLike) -> DatasetDescription:
    """Read a dataset's dataset.json, and check the types, shapes and sizes of its arrays' files, but not their content.

    Args:
        directory: the folder of the dataset.

    Returns:
        The description; a FolderDescription if the images are in files of their own, which are not looked at.

    Raises:
        DataError: A file is missing, damaged or of another format.
    """
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
    if content.pop("digest", None) != compute_digest(content):
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
    """Return a prepared dataset's description, after reading every byte of its arrays' files.

    Images in files of their own are not read: verify_images() does that.

    Raises:
        DataError: A file is missing, or anything differs from what was written.
    """
    description = read_description(directory)
    for filename, expected in description.sha256.items():
        path = Path(directory) / filename
        try:
            digest = content_digest(path)
        except OSError as error:
            raise _damaged(path, _os_reason(error)) from None
        if digest != expected:
            raise _damaged(path, "changed since it was written (SHA-256 differs)")
    return description


def open_split(directory: PathLike, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (N, C, H, W) uint8 and labels (N,) int64 of a prepared dataset's split, as memory maps.

    The dataset must have been prepared from arrays. The maps are copy-on-write: all processes of a host share one copy,
    no write reaches the files, and torch.from_numpy takes the maps without its warning about read-only arrays.

    Args:
        directory: the folder of the dataset.
        split: "train" or "test".

    Raises:
        InputError: There is no such split.
        DataError: A file is missing or damaged.
    """
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    images, labels = (_open_array(Path(directory) / f"{split}_{kind}.npy") for kind in ("images", "labels"))
    return images, labels


def open_images(directory: PathLike, split: str) -> tuple[np.ndarray | ImageFiles, np.ndarray]:
    """Open the images and labels of one split, "train" or "test", of a prepared dataset.

    The dataset may have been prepared from arrays or from a folder of image files.

    Args:
        directory: the folder of the dataset. For image files, call link_images() first.
        split: "train" or "test".

    Returns:
        The images, from which an index gets an image (C, H, W) uint8; and the labels, (N,) int64. The images are a
        copy-on-write memory map, or, for image files, an object that decodes a file at each access.

    Raises:
        InputError: There is no such split.
        DataError: A file is missing or damaged.
        OSError: The link to the folder of image files is missing.
    """
    path = Path(directory) / f"{split}_files.npy"
    if not path.exists():
        return open_split(directory, split)
    shape = read_description(directory).image_shape
    images = ImageFiles(_open_array(path), shape, Path(directory, IMAGES).readlink())
    return images, _open_array(Path(directory) / f"{split}_labels.npy")


def _open_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        size = array.offset + array.nbytes
        length = path.stat().st_size
    except OSError as error:
        raise _damaged(path, _os_reason(error)) from None
    except Exception:  # numpy raises half a dozen types for a header that makes no sense
        raise _damaged(path, "cut short, or not a .npy file") from None
    if length != size:
        raise _damaged(path, f"{length} bytes long, expected {size}")
    return array


def _expected_arrays(description: DatasetDescription) -> dict[str, tuple[tuple[int, ...], Any]]:
    channels, height, width = description.image_shape
    expected: dict[str, tuple[tuple[int, ...], Any]] = {}
    for split, samples in (("train", description.train_samples), ("test", description.test_samples)):
        expected[f"{split}_labels.npy"] = (samples,), np.dtype(np.int64)
        if isinstance(description, FolderDescription):
            expected[f"{split}_files.npy"] = (samples,), np.dtype(np.bytes_)
        else:
            expected[f"{split}_images.npy"] = (samples, channels, height, width), np.dtype(np.uint8)
    if set(description.sha256) != set(expected):
        raise ValueError
    return expected


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _os_reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else str(error.strerror or error)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is {what}", f"delete the folder {path.parent} and run again")
