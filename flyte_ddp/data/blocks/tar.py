"""Tar files in webdataset's layout as blocks. Each tar file is a block.

Files that follow one another and have the same name up to its first dot are a sample: 000.jpg and 000.cls.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from flyte_ddp.data.blocks.block_folder import Indexed, entry, write_index
from flyte_ddp.data.blocks.blocks import to_rows
from flyte_ddp.data.image_files import decode, reason
from flyte_ddp.data.remote_files import PiecesFile, Stored
from flyte_ddp.errors import DataError, InputError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


class TarImages(Indexed):
    """The images (n, C, H, W) uint8 and labels (n,) int64 of a folder of tar files.

    index_tars must have indexed the folder.

    Images are decoded when their file is fetched, so the node's cache holds images of one size.
    """

    def __init__(
        self,
        url: str | Path,
        shape: tuple[int, int, int],
        images: Sequence[str] = IMAGE_EXTENSIONS,
        labels: str = "cls",
    ):
        """Read the index.

        Args:
            url: the folder: s3://, gs://, abfs://, file:// or a path.
            shape: C, H and W, C being 1 or 3. Images are scaled to cover it, and cropped around the centre.
            images: the extensions that may hold a sample's image.
            labels: the extension of its label, a whole number as text.
        """
        super().__init__(url)
        self.shape = shape
        self.images = tuple(images)
        self.labels = labels

    def fetch(self, number: int, path: Path) -> None:
        name = self.name(number)
        length = int(self.lengths[number])
        kind = to_rows((np.zeros((1, *self.shape), np.uint8), np.zeros(1, np.int64)), name).dtype
        pieces = self.pieces(number)
        samples = 0
        with open(path, "xb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            for key, files in read_samples(pieces, name):
                file.write(to_rows(self._decoded(f"{name}: {key}", files), name).tobytes())
                samples += 1
        for _ in pieces:  # reading on to the end of the tar file checks its digest
            pass
        if samples != length:
            raise DataError(f"{name} has {samples} samples, where {length} were announced", "call index_tars again")

    def _decoded(self, name: str, files: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
        image = next((files[extension] for extension in self.images if extension in files), None)
        if image is None or self.labels not in files:
            raise DataError(f"{name} must have .{self.labels} and one of {', '.join(self.images)}, got {list(files)}")
        try:
            return decode(io.BytesIO(image), self.shape)[None], np.array([int(files[self.labels])])
        except Exception as error:  # Pillow raises half a dozen types for a broken file
            raise DataError(f"{name} cannot be read: {reason(error)}") from None


def index_tars(url: str | Path) -> None:
    """Write the index.json of a folder of tar files, with each file's number of samples, size and SHA-256.

    Each file NAME.tar, also in sub-folders, is read once, whole. Files and folders whose names begin with "." or "_"
    are left out. An earlier index is replaced.

    Args:
        url: the folder, on disk or in storage.

    Raises:
        InputError: A tar file has no samples, the folder has no tar file, or it cannot be written to.
        DataError: A tar file is damaged, cut short, has a link, or has two files of one sample with the same extension.
        DownloadError: The storage fails.
    """
    stored = Stored(url)
    blocks = []
    for name, size in stored.sizes().items():
        if PurePosixPath(name).suffix == ".tar":
            digest = hashlib.sha256()
            pieces = stored.pieces(name, size, digest)
            count = sum(1 for _ in read_samples(pieces, stored.name(name)))
            for _ in pieces:  # the digest needs the rest of the tar file, too
                pass
            if not count:
                raise InputError(f"{stored.name(name)} has no samples: remove it")
            blocks.append(entry(name, count, size, digest))
    write_index(stored, blocks)


def read_samples(pieces: Iterable[bytes], name: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield each sample of a tar file: its key, FOLDER/NAME, and the contents of its files by extension.

    A file's name is split at its first dot: a/b.seg.PNG has key a/b and extension "seg.png", in lower case. Files that
    follow one another and have the same key are a sample. Hidden files are left out.

    Args:
        pieces: the content of the tar file, piece by piece.
        name: the file's name, for messages.

    Raises:
        DataError: the tar file is cut short or damaged, has a link, or a sample has two files of one extension.
    """
    key = ""
    files = dict[str, bytes]()
    try:
        with tarfile.open(fileobj=PiecesFile(iter(pieces)), mode="r|") as opened:
            for member in opened:
                folder, _, last = member.name.rpartition("/")
                first, _, extension = last.partition(".")
                if not first:
                    continue
                if member.islnk() or member.issym():
                    raise DataError(
                        f"{name}: {member.name} is a link: files must be there with their content",
                        "write it again with tar --dereference --hard-dereference",
                    )
                if not member.isfile():
                    continue
                if files and key != f"{folder}/{first}":
                    yield key, files
                    files = {}
                key = f"{folder}/{first}"
                extension = extension.lower()
                if extension in files:
                    raise DataError(f"{name}: {key} has .{extension} more than once", "give each sample another name")
                content: Any = opened.extractfile(member)
                files[extension] = content.read()
            _check_end(opened, name)
    except tarfile.TarError as error:
        raise DataError(f"{name} is no tar file, or cut short: {error}") from None
    if files:
        yield key, files


def _check_end(opened: tarfile.TarFile, name: str) -> None:
    """Raise DataError unless a tar file ends with its end mark, a block of zeros, and only zeros follow.

    Call it when tarfile has read all members: it reads the rest of the file from there. It is needed because tarfile
    stops without an error where a file is cut short between members, and at a damaged header other than the first.
    """
    file: Any = opened.fileobj
    more = False
    while rest := file.read(tarfile.RECORDSIZE):
        more |= any(rest)
    if file.tell() % tarfile.BLOCKSIZE or file.tell() == opened.offset:
        raise DataError(f"{name} is no tar file, or cut short: its end is missing", "write it again")
    if more:
        raise DataError(f"{name}: more follows its end: it is damaged, or several in one", "write it again")
