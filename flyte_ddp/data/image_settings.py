"""Which image files of a folder become a dataset, and how. Standard library only."""

from dataclasses import dataclass
from typing import Tuple

from flyte_ddp.settings import Settings, setting


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Which images to use, and how each is prepared; decides the result.

    Attributes:
        source: folder is the one that is given, or digits where none is; lfw is Labeled Faces in the Wild, where
            torchvision finds it.
        image_size: pixels; images are resized and cut around their centre to squares of this side.
        channels: rgb or grayscale.
        unreadable_share: of the image files, at most, that may be impossible to decode; they are named and left out.
        least_images: classes with fewer of them are left out.
    """

    source: str = setting("folder", choices=("folder", "lfw"))
    image_size: int = setting(32, minimum=16, maximum=1024)
    channels: str = setting("rgb", choices=("rgb", "grayscale"))
    unreadable_share: float = setting(0.01, minimum=0, below=1)
    least_images: int = setting(2, minimum=2)

    @property
    def shape(self) -> Tuple[int, int, int]:
        return (3 if self.channels == "rgb" else 1, self.image_size, self.image_size)
