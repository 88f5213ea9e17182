"""Decodes image files as for training on a folder, but reports unreadable files instead of raising errors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flyte_ddp.data.image_files import MODES, decode, reason
from flyte_ddp.errors import InputError


def decode_all(paths: Sequence[Path], image_shape: tuple[int, int, int]) -> tuple[np.ndarray, Sequence[str]]:
    """Images (N, C, H, W) uint8, and for each the problem with its file, empty if it was read.

    A file that cannot be read gives zeros. InputError if Pillow does not support that many channels.
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
            problems[number] = reason(error)
    return images, problems
