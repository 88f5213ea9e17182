"""The inputs of an autoencoder's training, the message to its ranks, and the result. Standard library only."""

from dataclasses import dataclass
from typing import Any

from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochLosses, NotLearning
from flyte_ddp.settings import TRACKING, Settings, setting

DATASETS = ("auto", "mnist", "fashion_mnist", "digits")  # of 28 x 28 pixels, as the network takes them
PRECISIONS: dict[str, Any] = {
    "float32": "32-true",
    "bfloat16": "bf16-mixed",
    "float16": "16-mixed",
}  # ours: Lightning's
STRATEGIES = ("auto", "ddp")


@dataclass(frozen=True)
class AutoencoderHyperparameters(Settings):
    """What determines the result, and so the cache key.

    Attributes:
        dataset: auto is mnist, or digits in a local run that cannot download it.
        epochs: passes over the training images.
        batch_size: images of one step, all ranks together.
        learning_rate: of Adam.
        limit_train_batches: how many of its batches an epoch uses: up to 1 a share, above 1 a number.
        precision: bfloat16 and float16 are mixed with float32; float16 needs a GPU.
        seed: of the initial weights and the shuffling.
    """

    dataset: str = setting("auto", choices=DATASETS)
    epochs: int = setting(10, minimum=1)
    batch_size: int = setting(128, minimum=1)
    learning_rate: float = setting(1e-3, above=0)
    limit_train_batches: float = setting(1.0, above=0)
    precision: str = setting("float32", choices=tuple(PRECISIONS))
    seed: int = setting(1, minimum=0, maximum=2**32 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit_train_batches > 1 and not self.limit_train_batches.is_integer():
            raise InputError(
                "AutoencoderHyperparameters.limit_train_batches must be a share of at most 1, or a whole number of "
                f"batches, got {self.limit_train_batches:g}"
            )

    def steps_per_epoch(self, train_samples: int) -> int:
        """Number of optimizer steps; raises InputError if limit_train_batches leaves none."""
        batches = -(-train_samples // self.batch_size)
        limit = self.limit_train_batches
        steps = int(batches * limit) if limit <= 1 else min(batches, int(limit))
        if steps == 0:
            raise InputError(
                f"limit_train_batches must leave at least one of the {batches} batches of an epoch, got {limit:g}: "
                f"raise it to {1 / batches:.2g} or more, or lower batch_size"
            )
        return steps


@dataclass(frozen=True)
class AutoencoderOptions(Settings):
    """How to run it; the result is the same up to rounding, so the cache ignores these.

    Attributes:
        nproc: ranks to spawn; 0 is one per visible GPU, or two where there is none.
        strategy: Lightning's; auto is ddp for several ranks, and none for one.
        tracking: Lightning's logger: online and offline are Weights & Biases; auto is online where it has a key, else
            off; tensorboard writes event files.
        resume: whether to resume from the checkpoint of an unfinished run of the same training; each epoch ends with
            one.
        timeout_seconds: how long the ranks may go without a step before the run counts as hung.
    """

    nproc: int = setting(0, minimum=0, maximum=64)
    strategy: str = setting("auto", choices=STRATEGIES)
    tracking: str = setting("auto", choices=TRACKING)
    resume: bool = setting(True)
    timeout_seconds: float = setting(300.0, minimum=60, maximum=86400)


@dataclass(frozen=True)
class AutoencoderJob:
    """One training run, as the ranks need to know it.

    Attributes:
        name: of the run, for people to read.
        data: folder of the prepared dataset.
        model_path: where rank 0 writes the trained weights.
        encoded_path: where rank 0 writes the codes of the test images, see network.encode_test_images.
        checkpoint_path: where rank 0 keeps the checkpoint; training resumes from an earlier one there.
        key: identifies all that determines the result; a checkpoint with another key is ignored.
        logs: folder for Lightning's logger.
        tracking: online, offline, tensorboard or off.
        steps_per_epoch: optimizer steps.
        launched: time.time() of the launch.
    """

    hp: AutoencoderHyperparameters
    options: AutoencoderOptions
    name: str
    data: str
    model_path: str
    encoded_path: str
    checkpoint_path: str
    key: str
    logs: str
    tracking: str
    steps_per_epoch: int
    launched: float


@dataclass(frozen=True)
class AutoencoderResult:
    """What rank 0 knows at the end.

    Attributes:
        steps: (epochs so far, mean loss of that step's batch), every few steps.
        warnings: where training did not learn as it should.
        test_loss: mean squared error per pixel on the test images; pixels are from 0 to 1.
        strategy: the name of Lightning's strategy class.
    """

    epochs: list[EpochLosses]
    steps: list[tuple[float, float]]
    warnings: list[NotLearning]
    test_loss: float
    strategy: str
