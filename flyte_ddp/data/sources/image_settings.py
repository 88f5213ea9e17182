"""The settings that choose and prepare the image files of a folder. Standard library only."""

from dataclasses import dataclass

from flyte_ddp.fields import Settings, setting


@dataclass(frozen=True)
class ImageSettings(Settings):
    """The images to use, and how each is prepared. They determine the result."""

    image_size: int = setting(
        32,
        minimum=16,
        maximum=1024,
        help="pixels; images are resized and cropped around their centre to squares of this size.",
    )
    channels: str = setting("rgb", choices=("rgb", "grayscale"), help="rgb or grayscale.")
    unreadable_share: float = setting(
        0.01,
        minimum=0,
        below=1,
        help="the largest allowed share of files that cannot be decoded; these are named and left out.",
    )
    least_images: int = setting(2, minimum=2, help="classes with fewer images are left out.")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3 if self.channels == "rgb" else 1, self.image_size, self.image_size)
