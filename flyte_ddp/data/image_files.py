"""Image files as a dataset: decoded one by one, when needed, to the same size and channels."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flyte_ddp.errors import DataError

IMAGES = "images"  # beside an index: a link to the folder of the images
MOST_PIXELS = 50_000_000  # each thread that decodes so many needs up to 0.5 GB; a file of some KiB can claim them
MODES = {1: "L", 3: "RGB"}  # Pillow's names, by channels
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC = 0x0112, 258, 262  # tags of EXIF and TIFF
SIDEWAYS = range(5, 9)  # the orientations that swap width and height
# Pillow would try every format, and start Ghostscript for an EPS file that is called .png
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SCALED = ("PNG", "PPM")  # formats of which Pillow reads 16 bits as mode I, PNG before its version 11


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
        self.names = names
        self.shape = shape
        self.folder = folder

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        """Raise DataError naming the file if it cannot be decoded, although it could when the folder was indexed."""
        path = os.path.join(self.folder, os.fsdecode(self.names[index]))
        try:
            return decode(path, self.shape)
        except Exception as error:  # Pillow raises half a dozen types for a broken file
            raise DataError(
                f"{path} can no longer be read ({reason(error)}): put it back as it was, or run again without it"
            ) from None


def decode(file: str | Path | BinaryIO, shape: tuple[int, int, int], formats: tuple[str, ...] = FORMATS) -> np.ndarray:
    """The image, of an animation or of several pages the first, as (C, H, W) uint8: turned upright, without its
    transparency, scaled to cover that shape, and cropped around its centre.

    Of 16 bits the upper 8 remain; ValueError for whole numbers of 32 bits and floats, whose range no file tells.
    """
    from PIL import Image, ImageOps

    channels, height, width = shape
    with Image.open(file, formats=formats) as image:
        # Decodes a large JPEG at 1/2, 1/4 or 1/8 of its size, which is that of the image before it is turned
        on_its_side = image.getexif().get(ORIENTATION) in SIDEWAYS
        image.draft(MODES[channels], (height, width) if on_its_side else (width, height))
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than {MOST_PIXELS:,}: scale it down")
        upright = _in_8_bits(ImageOps.exif_transpose(image), image)
        upright.info.pop("transparency", None)  # else Pillow warns of each palette that has some
        fitted = ImageOps.fit(upright.convert(MODES[channels]), (width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(height, width, channels).transpose(2, 0, 1)


def _in_8_bits(upright: Any, opened: Any) -> Any:
    """The image with the upper 8 bits of its values; Pillow does so itself for colours, but would clip grey ones."""
    from PIL import Image

    mode = opened.mode
    if not mode.startswith("I;16") and not (mode == "I" and opened.format in SCALED):
        if mode in ("I", "F"):
            raise ValueError(f"values of 32 bits, or with a sign (mode {mode}): write it in 8 or 16 bits")
        return upright
    is_tiff = opened.format == "TIFF"  # Pillow scales the values of others to 16 bits
    values = np.asarray(upright) >> (opened.tag_v2[BITS_PER_SAMPLE][0] - 8 if is_tiff else 8)
    white_is_zero = is_tiff and opened.tag_v2[PHOTOMETRIC] == 0
    return Image.fromarray((255 - values if white_is_zero else values).astype(np.uint8))


def reason(error: Exception) -> str:
    """Why a file cannot be decoded, in a few words and without its path, which the message has already."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:100]
