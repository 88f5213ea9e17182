"""Labeled Faces in the Wild, as torchvision stores it."""

from importlib.metadata import version
from pathlib import Path

from flyte_ddp.data.datasets import data_dir
from flyte_ddp.errors import InputError


def lfw_folder() -> Path:
    """The folder of the funneled images, a sub-folder for each person; InputError where torchvision finds none."""
    from torchvision import datasets

    try:
        return Path(datasets.LFWPeople(str(data_dir())).images_dir)
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"Labeled Faces in the Wild is not in {data_dir() / 'lfw-py'} ({error}), and torchvision "
            f"{version('torchvision')} no longer downloads it: put lfw-funneled.tgz, people.txt and lfw-names.txt "
            "there and unpack the first, or give the unpacked folder as --folder instead"
        ) from None
