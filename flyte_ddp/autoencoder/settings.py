"""The inputs of an autoencoder's training."""

from dataclasses import dataclass

from flyte_ddp.fields import setting
from flyte_ddp.lightning.settings import LightningSettings

DATASETS = ("auto", "mnist", "fashion_mnist", "digits")  # of 28 x 28 pixels, as the network takes them


@dataclass(frozen=True)
class AutoencoderHyperparameters(LightningSettings):
    """What determines the result, and so the cache key.

    Attributes:
        dataset: auto is mnist, or digits in a local run that cannot download it.
        epochs: passes over the training images.
        batch_size: images of one step, all ranks together.
        learning_rate: of Adam.
    """

    dataset: str = setting("auto", choices=DATASETS)
    epochs: int = setting(10, minimum=1)
    batch_size: int = setting(128, minimum=1)
    learning_rate: float = setting(1e-3, above=0)
