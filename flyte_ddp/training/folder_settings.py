"""The inputs of what reads folders of image files. Standard library only."""

from dataclasses import dataclass
from typing import Tuple

from flyte_ddp.settings import Settings, setting
from flyte_ddp.training.hyperparameters import Hyperparameters


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Which images there are, and what becomes of each; decides the result.

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


@dataclass(frozen=True)
class FolderHyperparameters(Hyperparameters):
    """Hyperparameters with other defaults: folders tend to have fewer images, and larger ones, than MNIST."""

    dataset: str = setting("image_folder", choices=("image_folder",))
    batch_size: int = setting(64, minimum=1)
    epochs: int = setting(10, minimum=1)
    learning_rate: float = setting(0.1, above=0)
    test_batch_size: int = setting(250, minimum=1)


@dataclass(frozen=True)
class LoadingSettings(Settings):
    """What the loading study tries.

    Attributes:
        passes: over the images, for each setting.
        most_images: of a pass; of a larger folder each pass takes others.
        most_workers: 0, 1, 2, 4 and so on up to this many are tried; 0 is twice the cores, at most 16.
        batch_size: images of one batch.
    """

    passes: int = setting(5, minimum=2, maximum=100)
    most_images: int = setting(4096, minimum=1)
    most_workers: int = setting(0, minimum=0, maximum=64)
    batch_size: int = setting(128, minimum=1)
