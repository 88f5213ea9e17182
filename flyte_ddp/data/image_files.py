"""Image files as a dataset: decoded one by one, when needed, to the same size and channels."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flyte_ddp.errors import DataError

IMAGES = "images"  # beside an index: a link to the folder of the images
MOST_PIXELS = 50_000_000  # each thread that decodes so many needs up to 0.5 GB; a file of some KiB can claim them
MODES = {1: "L", 3: "RGB"}  # Pillow's names, by channels


def link_images(index: Path, folder: Path) -> None:
    """Says in the folder of an index where the images are."""
    link = index / IMAGES
    link.unlink(missing_ok=True)
    link.symlink_to(folder.absolute())


class ImageFiles:
    """The images of a split by index, each (C, H, W) uint8, as in an array of images.

    names: (N,) bytes, relative to the folder.
    """

    def __init__(self, names: np.ndarray, shape: tuple[int, int, int], folder: Path):
        self.names, self.shape, self.folder = names, shape, folder

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        """Raises DataError naming the file if it cannot be decoded, although it could when the folder was indexed."""
        path = os.path.join(self.folder, os.fsdecode(self.names[index]))
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
