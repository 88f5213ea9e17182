"""The index of a folder with one sub-folder of image files per class: every image is found, read and described."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flyte_ddp.data.description import FolderDescription
from flyte_ddp.data.image_files import decode, reason
from flyte_ddp.data.prepared.prepared import DESCRIPTION, SPLITS
from flyte_ddp.data.prepared.writer import mean_and_std, pixel_counts, write_dataset
from flyte_ddp.data.sources.datasets import data_dir
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.launch.environment import available_cores
from flyte_ddp.whole_files import files_below, reading, temporary_beside

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Names of splits in users' folders; upper and lower case are the same
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
TEST_EVERY = 5
MOST_NAMED = 5  # how many of the unreadable files are listed
BLOCK = 256  # how many decoded images are held in memory at once

# Names of files by split and class; the split is "" if the folder is not divided
Files = dict[str, dict[str, list[str]]]


class Sound(NamedTuple):
    """A file that can be decoded: the SHA-256 of its bytes, and a histogram of its image's values, (C, 256)."""

    sha256: bytes
    counts: np.ndarray


def list_images(folder: Path) -> Files:
    """Return the names of a folder's image files, relative to the folder and sorted, by split and class.

    No file is read. The folder has a sub-folder for each class, or sub-folders train and test, with classes in each.

    Returns:
        {"train": ..., "test": ...}, or {"": ...} if there are no train and test. Each value has a list of names by
        class.

    Raises:
        InputError: The folder is not there or may not be read; the folder, train or test has no image files; there is
            only one class to train on; a class is in test alone; or there are other splits, such as "valid".
    """
    with reading():
        paths = _all_images(folder)
    for split, classes in paths.items():
        where = f"folder {folder / split}"
        if not classes:
            raise InputError(
                f"{where} has no image files ({', '.join(EXTENSIONS)}) in sub-folders: put those of each class into "
                "a sub-folder with the name of the class"
            )
        if split != "test" and len(classes) == 1:
            raise InputError(f"{where} has one class only, {next(iter(classes))!r}: at least two are needed")
    strange = sorted(set(paths.get("test", {})) - set(paths.get("train", {})))
    if strange:
        raise InputError(f"folder {folder / 'test'} has classes that train/ has not: {', '.join(strange[:MOST_NAMED])}")
    return paths


def _all_images(folder: Path) -> Files:
    """Return the names of a folder's image files, relative to the folder, by split and class.

    If the folder has both sub-folders train and test, the splits are "train" and "test". Otherwise the only split is
    "". Classes without image files are left out, so a split may be empty.

    Raises:
        InputError: The folder is not there, or its sub-folders are splits, but not just train and test.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"folder {folder} {what}: give a folder with one sub-folder of image files per class")
    divided = all((folder / split).is_dir() for split in SPLITS)
    paths: Files = {}
    for split in SPLITS if divided else ("",):
        below = _sub_folders(folder / split)
        classes = {name: _image_names(folder, Path(split, name)) for name in below}
        paths[split] = {name: files for name, files in classes.items() if files}
    _refuse_splits(folder, _sub_folders(folder) if divided else [], paths.get("", {}))
    return paths


def _refuse_splits(folder: Path, divided: Sequence[str], classes: Mapping[str, Sequence[str]]) -> None:
    """Raise InputError if sub-folders are splits, but not just train and test.

    Sub-folders are splits if several have names of splits, such as "valid". If only one has such a name, it is a split
    if any of its image files lie in sub-folders of its own, and otherwise a class.

    Args:
        folder: the folder, for the message.
        divided: the names of all sub-folders, if both train and test are among them; otherwise empty.
        classes: the image files of each sub-folder, by its name; empty if both train and test are there.
    """
    named = [name for name in (*divided, *classes) if name.lower() in SPLIT_NAMES]
    files = classes[named[0]] if len(named) == 1 else []
    is_split = len(named) > 1 or any(Path(file).parent != Path(named[0]) for file in files)
    if is_split and set(named) != set(SPLITS):
        raise InputError(
            f"folder {folder} must have classes as sub-folders, or train and test with classes in them, got "
            f"{', '.join(map(_printable, named))}: name the splits train and test, and move others out of the folder"
        )


def _sub_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def stamp_images(folder: Path) -> str:
    """Return a digest that changes when an image file of a folder is added, removed or written to.

    Only names, sizes and times are read.

    Args:
        folder: the folder, with a sub-folder for each class, or sub-folders train and test with classes in each.

    Raises:
        InputError: The folder is not there, its sub-folders are not as described, or it has no image files or too few
            classes.
    """
    digest = hashlib.sha256()
    classes = chain.from_iterable(by_class.values() for by_class in list_images(folder).values())
    for name in chain.from_iterable(classes):
        digest.update(os.fsencode(name) + b"\0")
        with suppress(OSError):  # index_folder counts a broken link when it tries to read the file
            status = (folder / name).stat()
            # Another file may have been copied or unpacked there with the size and time of the one before
            digest.update(f"{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\0".encode())
    return digest.hexdigest()


def index_folder(folder: Path, name: str, images: ImageSettings, say: Callable[[str], None]) -> Path:
    """Read every image of a folder, and write an index of them.

    The index is a prepared dataset that has the images' names instead of the images. It is below the folder for local
    data. Its name is a hash of its content, so the same images have one index. Images that cannot be read are left out.
    link_images() links the index to the images later.

    Args:
        folder: the folder of the images, with a sub-folder for each class, or sub-folders train and test with classes
            in each.
        name: the name of the dataset.
        images: the settings.
        say: prints a line, which tells how many images cannot be read.

    Returns:
        The folder of the index.

    Raises:
        InputError: The sub-folders are not as described, too many files cannot be read, too few images or classes are
            left, or the index cannot be written.
    """
    paths = list_images(folder)
    classes = _large_classes(paths, images.least_images)
    splits = _divide(paths, classes)
    kept, bad, content, counts = _read_images(folder, splits, images)
    _judge(folder, bad, sum(map(len, splits.values())), images.unreadable_share, say)
    if not all(kept.values()):
        raise InputError(f"folder {folder} leaves no images to train or to test on: add some, or lower least_images")
    mean, std = mean_and_std(counts)
    by_name = "sub-folders train and test"
    description = FolderDescription(
        name=name,
        classes=tuple(map(_printable, classes)),
        mean=mean,
        std=std,
        train_samples=len(kept["train"]),
        test_samples=len(kept["test"]),
        image_shape=images.shape,
        split_by=by_name if "test" in paths else f"one in {TEST_EVERY} of each class for testing",
        unreadable=len(bad),
        unreadable_named=tuple(bad[:MOST_NAMED]),
        left_out=len(next(iter(paths.values()))) - len(classes),
        content_sha256=content,
    )
    arrays: dict[str, np.ndarray] = {}
    for split, rows in kept.items():
        arrays[f"{split}_files.npy"] = np.array([os.fsencode(file) for _, file in rows])
        arrays[f"{split}_labels.npy"] = np.array([label for label, _ in rows])
    key = hashlib.sha256(repr((name, images, bad, content)).encode()).hexdigest()[:16]
    directory = data_dir() / "folders" / key
    write_dataset(directory, arrays, description)
    return directory


def verify_images(index: Path, folder: Path) -> None:
    """Read every image that an index names, to check that it is as it was indexed.

    Images in the folder that the index does not name are not noticed.

    Args:
        index: the folder of the index.
        folder: the folder of the images.

    Raises:
        DataError: An image is missing, cannot be read or has another content.
    """
    content = hashlib.sha256()
    try:
        for split in SPLITS:
            for name in np.load(index / f"{split}_files.npy"):
                content.update(name + b"\0" + hashlib.sha256((folder / os.fsdecode(name)).read_bytes()).digest())
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})", "run again") from None
    if content.hexdigest() != json.loads((index / DESCRIPTION).read_bytes())["content_sha256"]:
        raise DataError(f"{folder} has other images than when it was indexed", "run again")


class Readable(NamedTuple):
    """The images of a folder that can be read.

    Attributes:
        kept: label and name of each image, by split.
        bad: a line with name and reason for each other image.
        content: the digest of the images' names and contents.
        counts: a histogram of the training images' values, (C, 256).
    """

    kept: dict[str, list[tuple[int, str]]]
    bad: list[str]
    content: str
    counts: np.ndarray


def _read_images(folder: Path, splits: Mapping[str, Sequence[tuple[int, str]]], images: ImageSettings) -> Readable:
    """Read and decode all images, and return which can be read, which cannot, and a digest and histogram of the former.

    Args:
        folder: the folder of the images.
        splits: label and name of each image, by split.
        images: the settings, which have the shape to decode to.
    """
    kept: dict[str, list[tuple[int, str]]] = {split: [] for split in SPLITS}
    bad: list[str] = []
    content = hashlib.sha256()
    counts = np.zeros((images.shape[0], 256), np.int64)
    for split, rows in splits.items():
        for (label, file), read in zip(rows, _read_all(folder, rows, images.shape), strict=True):
            if isinstance(read, str):
                bad.append(f"{_printable(file)} ({read})")
                continue
            kept[split].append((label, file))
            content.update(os.fsencode(file) + b"\0" + read.sha256)
            if split == "train":
                counts += read.counts
    return Readable(kept, bad, content.hexdigest(), counts)


def write_folder(folder: Path, classes: Sequence[str], images: np.ndarray, labels: np.ndarray) -> None:
    """Write images (N, C, H, W) as PNG files NUMBER.png, with a sub-folder per class. C is 1 or 3; labels are (N,).

    The folder appears whole or not at all. A folder that is there already stays, without an error. Raises OSError if
    the folder cannot be written.
    """
    from PIL import Image

    beside = temporary_beside(folder)
    try:
        for name in classes:
            (beside / name).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            pixels = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
            Image.fromarray(pixels).save(beside / classes[label] / f"{number:06}.png")
        os.rename(beside, folder)
    except OSError:
        if not folder.is_dir():  # another process may have written the folder in the meantime
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _large_classes(paths: Files, least_images: int) -> list[str]:
    """Return the names of the classes that have at least `least_images` images, in the order of `paths`.

    If the folder has the sub-folders train and test, only the images in train count. Otherwise all images count,
    including those that will be used for testing.

    Args:
        paths: the names of the image files by split and class, as list_images() returns them.
        least_images: the fewest images of a class.

    Raises:
        InputError: Fewer than two classes have so many images.
    """
    classes = [name for name, files in next(iter(paths.values())).items() if len(files) >= least_images]
    if len(classes) < 2:
        raise InputError(
            f"ImageSettings.least_images is {least_images}, and {len(classes)} classes have as many: at least two are "
            "needed, so lower it"
        )
    return classes


def _divide(paths: Files, classes: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """Return label and name of each image of these classes, by the splits "train" and "test".

    A label is the class's index in `classes`. If the folder has no sub-folders train and test, one in TEST_EVERY images
    of each class is for testing. Within a split, classes alternate, so that any part of it has all of them.

    Args:
        paths: the names of the image files by split and class, as list_images() returns them.
        classes: the names of the classes to use. Images of other classes are left out.
    """
    rows: dict[str, list[tuple[int, int, str]]] = {split: [] for split in SPLITS}
    for label, name in enumerate(classes):
        for split, named in paths.items():
            for turn, file in enumerate(named.get(name, [])):
                # The second image of a class is for testing, so that a class with only two is in both splits
                rows[split or SPLITS[turn % TEST_EVERY == 1]].append((turn, label, file))
    return {split: [(label, file) for _, label, file in sorted(rows[split])] for split in SPLITS}


def _read_all(folder: Path, rows: Sequence[tuple[int, str]], shape: tuple[int, int, int]) -> Iterator[Sound | str]:
    """Read and decode image files by several threads, and yield a result for each, in their order.

    Args:
        folder: the folder of the images.
        rows: label and name of each image. The labels are not used.
        shape: (C, H, W), to which each image is decoded.

    Yields:
        The SHA-256 of the file and a histogram of the image's values; or, if the file cannot be read, a text that says
        why.
    """

    def read(row: tuple[int, str]) -> Sound | str:
        try:
            content = (folder / row[1]).read_bytes()
            return Sound(hashlib.sha256(content).digest(), pixel_counts(decode(io.BytesIO(content), shape)[None]))
        except Exception as error:  # Pillow raises half a dozen types for a broken file
            return reason(error)

    with ThreadPoolExecutor(available_cores()) as pool:  # Pillow releases Python's lock while it decodes
        for start in range(0, len(rows), BLOCK):
            yield from pool.map(read, rows[start : start + BLOCK])


def _judge(folder: Path, bad: Sequence[str], count: int, limit: float, say: Callable[[str], None]) -> None:
    """Print how many of `count` image files cannot be read, and the first texts of `bad`, which has one for each.

    Nothing is printed if `bad` is empty. Raises InputError instead if their share is above `limit`, from 0 to 1.
    """
    if not bad:
        return
    listed = "; ".join(bad[:MOST_NAMED]) + ("; …" if len(bad) > MOST_NAMED else "")
    message = f"{len(bad):,} of {count:,} image files in {folder} cannot be read ({len(bad) / count:.2%})"
    if len(bad) / count > limit:
        raise InputError(
            f"{message}, more than ImageSettings.unreadable_share ({limit:.2%}) allows: {listed}. "
            "Repair or remove them, or raise it"
        )
    say(f"{message} and are left out: {listed}")


def _image_names(folder: Path, below: Path) -> list[str]:
    """Return the image files anywhere below a sub-folder, by names relative to the folder, sorted.

    Hidden files, and files in hidden folders, are left out.
    """
    files = (file for file in files_below(folder / below) if file.name.lower().endswith(EXTENSIONS))
    names = (os.path.relpath(file, folder) for file in files)
    return sorted(name for name in names if "/." not in name)


def _printable(name: str) -> str:
    """Return a file's name as text. File names are bytes, and not all bytes are text."""
    return os.fsencode(name).decode(errors="replace")
