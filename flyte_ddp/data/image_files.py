"""Image files as a dataset. Each is decoded when it is needed, to the same size and channels."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flyte_ddp.errors import DataError

IMAGES = "images"  # the name of the link beside an index that leads to the folder of the images
MOST_PIXELS = 50_000_000  # each thread that decodes so many needs up to 0.5 GB; a file of some KiB can claim them
MODES = {1: "L", 3: "RGB"}  # Pillow's names, by channels
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC = 0x0112, 258, 262  # tags of EXIF and TIFF
SIDEWAYS = range(5, 9)  # the orientations that swap width and height
# Pillow would try every format, and start Ghostscript for an EPS file that is called .png
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SCALED = ("PNG", "PPM")  # formats whose 16 bits Pillow reads as mode I; since Pillow 11, PNG is none of them


def link_images(index: Path, folder: Path) -> None:
    """Link the folder of an index to the folder of its images."""
    link = index / IMAGES
    link.unlink(missing_ok=True)
    link.symlink_to(folder.absolute())


class ImageFiles:
    """The images of a split by index, each (C, H, W) uint8, as in an array of images.

    Args:
        names: (N,) bytes, relative to the folder.
        shape: (C, H, W).
        folder: the folder of the images.
    """

    def __init__(self, names: np.ndarray, shape: tuple[int, int, int], folder: Path):
        self.names = names
        self.shape = shape
        self.folder = folder

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        """Decode an image.

        Raises DataError naming the file if it cannot be decoded, although it could when it was indexed.
        """
        path = os.path.join(self.folder, os.fsdecode(self.names[index]))
        try:
            return decode(path, self.shape)
        except Exception as error:  # Pillow raises half a dozen types for a broken file
            raise DataError(
                f"{path} can no longer be read ({reason(error)}): put it back as it was, or run again without it"
            ) from None


def decode(file: str | Path | BinaryIO, shape: tuple[int, int, int]) -> np.ndarray:
    """Decode an image file, or the first image of an animation or of several pages, to an array (C, H, W) uint8.

    The image is turned upright, loses its transparency, is scaled until it covers H x W, and is cropped around its
    centre. Values of 16 bits keep their upper 8 bits.

    Args:
        file: the path of the file, or the opened file.
        shape: (C, H, W); C is 1 or 3.

    Raises:
        ValueError: The values have 32 bits or a sign, or are floats, so their range is unknown; or the image has more
            than MOST_PIXELS pixels, which is 50 million.
        Exception: What Pillow raises for a broken file, such as OSError.
    """
    from PIL import Image, ImageOps

    channels, height, width = shape
    with Image.open(file, formats=FORMATS) as image:
        # draft() decodes a large JPEG at 1/2, 1/4 or 1/8 of its size. It takes the size before the image is turned.
        on_its_side = image.getexif().get(ORIENTATION) in SIDEWAYS
        image.draft(MODES[channels], (height, width) if on_its_side else (width, height))
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than {MOST_PIXELS:,}: scale it down")
        upright = _in_8_bits(ImageOps.exif_transpose(image), image)
        upright.info.pop("transparency", None)  # without this, Pillow warns of each palette with transparency
        fitted = ImageOps.fit(upright.convert(MODES[channels]), (width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(height, width, channels).transpose(2, 0, 1)


def _in_8_bits(upright: Any, opened: Any) -> Any:
    """Return the image with 8 bits, if it has grey values of 9 to 16 bits; otherwise return `upright` itself.

    The upper 8 bits remain; Pillow's own conversion would clip the values. A TIFF image in which 0 is white is inverted
    if its values are reduced.

    Args:
        upright: the Pillow image, turned upright.
        opened: the same image as it was opened, which knows the file's format and tags.

    Raises:
        ValueError: The values have 32 bits or a sign, or are floats.
    """
    from PIL import Image

    mode = opened.mode
    if not mode.startswith("I;16") and not (mode == "I" and opened.format in SCALED):
        if mode in ("I", "F"):
            raise ValueError(f"values of 32 bits, or with a sign (mode {mode}): write it in 8 or 16 bits")
        return upright
    is_tiff = opened.format == "TIFF"  # Pillow scales the values of other formats to 16 bits
    values = np.asarray(upright) >> (opened.tag_v2[BITS_PER_SAMPLE][0] - 8 if is_tiff else 8)
    white_is_zero = is_tiff and opened.tag_v2[PHOTOMETRIC] == 0
    return Image.fromarray((255 - values if white_is_zero else values).astype(np.uint8))


def reason(error: Exception) -> str:
    """Return an error's reason on one line of at most 100 characters, without the file's path."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:100]
