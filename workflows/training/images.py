"""Image files as a network takes them: decoded, upright, of the channels and the size that it was trained on."""

from pathlib import Path
from typing import Sequence, Tuple

import numpy as np

from workflows.training.errors import InputError

MODES = {1: "L", 3: "RGB"}  # of Pillow, by number of channels


def decode(path: Path, image_shape: Tuple[int, int, int]) -> np.ndarray:
    """The image (C, H, W) uint8; raises whatever Pillow raises for a file that is none."""
    from PIL import Image, ImageOps

    channels, height, width = image_shape
    with Image.open(path) as file:
        upright = ImageOps.exif_transpose(file).convert(MODES[channels])
        pixels = np.asarray(upright.resize((width, height), Image.Resampling.BILINEAR))
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)


def decode_all(paths: Sequence[Path], image_shape: Tuple[int, int, int]) -> Tuple[np.ndarray, Sequence[str]]:
    """Images (N, C, H, W) uint8 and for each what is wrong with its file, empty where nothing is.

    A file that cannot be read leaves zeros. InputError where Pillow has no images of so many channels.
    """
    if image_shape[0] not in MODES:
        raise InputError(
            f"a folder's images can have 1 or 3 channels, the dataset's have {image_shape[0]}: leave folder out"
        )
    images = np.zeros((len(paths), *image_shape), np.uint8)
    problems = [""] * len(paths)
    for number, path in enumerate(paths):
        try:
            images[number] = decode(path, image_shape)
        except Exception as error:  # Pillow's decoders raise a dozen types for a damaged file
            problems[number] = f"{type(error).__name__}: {error}".replace(str(path), path.name)
    return images, problems
