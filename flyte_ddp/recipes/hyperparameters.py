"""The settings of the built-in image classifiers."""

from dataclasses import dataclass

from flyte_ddp.errors import InputError
from flyte_ddp.fields import setting
from flyte_ddp.settings import TrainingSettings

DATASETS = ("auto", "mnist", "fashion_mnist", "cifar10", "digits")
MODELS = ("mnist_cnn", "fashion_cnn", "cifar_cnn", "resnet9", "resnet9_small", "airbench94")
SCHEDULES = ("onecycle", "constant")


@dataclass(frozen=True)
class Hyperparameters(TrainingSettings):
    """The settings that determine the result of the built-in image classifiers."""

    sgd_momentum: float = setting(0.9, minimum=0, below=1, help="momentum of SGD.")
    learning_rate: float = setting(0.2, above=0, help="of SGD; the peak rate if the schedule is onecycle.")
    model: str = setting("mnist_cnn", choices=MODELS, help="name of the network; flyte_ddp/recipes/models.py has them.")
    dataset: str = setting(
        "auto",
        choices=DATASETS,
        help="auto is the workflow's own dataset, or digits in a local run that cannot download it.",
    )
    schedule: str = setting(
        "onecycle",
        choices=SCHEDULES,
        help="onecycle (linear up from a tenth, linear down to a thousandth of the peak) or constant.",
    )
    warmup_fraction: float = setting(0.25, above=0, below=1, help="share of steps in which the onecycle rate rises.")
    weight_decay: float = setting(5e-5, minimum=0, help="of SGD (an L2 penalty).")
    norm_bias_factor: float = setting(
        1.0, above=0, help="factor of the learning rate of batch norm's biases, whose weight decay is divided by it."
    )
    nesterov: bool = setting(True, help="whether to use Nesterov momentum.")
    clip_norm: float = setting(0.5, minimum=0, help="gradient clipping by Euclidean norm over all weights; 0 is off.")
    train_fraction: float = setting(
        1.0, above=0, maximum=1, help="share of the training images that each epoch uses, different ones in each epoch."
    )
    shift_pixels: int = setting(
        0,
        minimum=0,
        maximum=8,
        help="training images are shifted at random by up to this many pixels, padded with zeros.",
    )
    flip: bool = setting(False, help="whether training images are mirrored left to right at random.")
    alternate_flips: bool = setting(False, help="whether each image is instead mirrored every other epoch; needs flip.")
    label_smoothing: float = setting(0.1, minimum=0, below=1, help="share of the target that all classes get evenly.")
    ema_decay: float = setting(
        0.0,
        minimum=0,
        below=1,
        help="decay per step of the exponential moving average of the weights, which is evaluated and returned; at "
        "step n it is at most (1 + n) / (10 + n); 0 is off.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.validation_fraction:
            self.check_validation()
        if self.alternate_flips and not self.flip:
            raise InputError(f"{type(self).__name__}.flip must be true where alternate_flips is, got false: set it")


@dataclass(frozen=True)
class FashionMNISTHyperparameters(Hyperparameters):
    """Hyperparameters with the recipe for Fashion-MNIST as their defaults."""

    epochs: int = setting(10, minimum=1)
    model: str = setting("fashion_cnn", choices=MODELS)
    weight_decay: float = setting(5e-4, minimum=0)
    flip: bool = setting(True)


@dataclass(frozen=True)
class CIFAR10Hyperparameters(Hyperparameters):
    """Hyperparameters with the recipe for CIFAR-10 as their defaults."""

    epochs: int = setting(10, minimum=1)
    model: str = setting("resnet9_small", choices=MODELS)
    weight_decay: float = setting(5e-4, minimum=0)
    shift_pixels: int = setting(4, minimum=0, maximum=8)
    flip: bool = setting(True)


@dataclass(frozen=True)
class FolderHyperparameters(Hyperparameters):
    """Hyperparameters for image folders, which tend to have fewer and larger images than MNIST."""

    dataset: str = setting("image_folder", choices=("image_folder",))
    batch_size: int = setting(64, minimum=1)
    epochs: int = setting(10, minimum=1)
    learning_rate: float = setting(0.1, above=0)
    test_batch_size: int = setting(250, minimum=1)
