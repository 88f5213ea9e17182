"""Image files as a dataset: decoded one by one, when needed, to the same size and channels."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flyte_ddp.errors import DataError
from flyte_ddp.storage import write_whole

ACCESS = "access.json"
MOST_PIXELS = 50_000_000  # each thread that decodes so many needs up to 0.5 GB; a file of some KiB can claim them
MODES = {1: "L", 3: "RGB"}  # Pillow's names, by channels


@dataclass(frozen=True)
class Access:
    """How a run finds its images; the result does not depend on this.

    Attributes:
        root: the folder that the images' names are relative to.
    """

    root: str


def write_access(directory: Path, access: Access) -> None:
    write_whole(directory / ACCESS, json.dumps(asdict(access)).encode())


def read_access(directory: Path) -> Access:
    return Access(**json.loads((directory / ACCESS).read_bytes()))


class ImageFiles:
    """The images of a split by index, each (C, H, W) uint8, as in an array of images.

    names: (N,) bytes, relative to access.root.
    """

    def __init__(self, names: np.ndarray, shape: tuple[int, int, int], access: Access):
        self.names, self.shape, self.access = names, shape, access

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        """Raises DataError naming the file if it cannot be decoded, although it could when the folder was indexed."""
        path = os.path.join(self.access.root, os.fsdecode(self.names[index]))
        try:
            return decode(path, self.shape)
        except Exception as error:  # Pillow raises half a dozen types for a broken file
            raise DataError(
                f"{path} can no longer be read ({reason(error)}): put it back as it was, or run again without it"
            ) from None


def decode(file: str | Path | BinaryIO, shape: tuple[int, int, int]) -> np.ndarray:
    """The image as (C, H, W) uint8: scaled to cover that shape, and cropped around its centre."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    with Image.open(file) as image:
        image.draft(MODES[channels], (width, height))  # decodes a large JPEG at 1/2, 1/4 or 1/8 of its size
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than {MOST_PIXELS:,}: scale it down")
        upright = ImageOps.exif_transpose(image).convert(MODES[channels])
        fitted = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(height, width, channels).transpose(2, 0, 1)


def reason(error: Exception) -> str:
    """Why a file cannot be decoded, in a few words and without its path, which the message has already."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:100]
