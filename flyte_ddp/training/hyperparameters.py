"""The two inputs of a training run: what decides the result, and how to run it."""

from dataclasses import dataclass

from flyte_ddp.training.settings import Settings, setting

BACKENDS = ("auto", "gloo", "nccl")
DATASETS = ("auto", "mnist", "fashion_mnist", "cifar10", "digits")
PRECISIONS = ("auto", "float32", "bfloat16")
MODELS = ("mnist_cnn", "fashion_cnn", "cifar_cnn", "resnet9", "resnet9_small")
SCHEDULES = ("onecycle", "constant")
TRACKING = ("auto", "online", "offline", "tensorboard", "off")


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """What every recipe's settings have. They decide the result, and are therefore the cache key.

    Attributes:
        backend: process group backend; auto is nccl where a GPU is visible, else gloo.
        seed: of the initial weights, the shuffling and the augmentation.
        log_interval: steps between two log lines.
        batch_size: samples of one optimizer step, all ranks together.
        test_batch_size: samples of one evaluation batch, all ranks together.
        epochs: passes over the training samples.
        precision: of the forward and backward pass; auto is bfloat16 where the hardware computes in it.
    """

    backend: str = setting("auto", choices=BACKENDS)
    seed: int = setting(1, minimum=0, maximum=2**32 - 1)
    log_interval: int = setting(10, minimum=1)
    batch_size: int = setting(128, minimum=1)
    test_batch_size: int = setting(1000, minimum=1)
    epochs: int = setting(2, minimum=1)
    precision: str = setting("auto", choices=PRECISIONS)


@dataclass(frozen=True)
class Hyperparameters(TrainingSettings):
    """The settings of this library's image classifiers.

    Attributes:
        sgd_momentum: momentum of SGD.
        learning_rate: of SGD; the peak where the schedule is onecycle.
        model: name of the network, see flyte_ddp/training/models.py.
        dataset: auto is the workflow's own or, only in a local run that cannot get it, digits.
        schedule: onecycle (linear up from a tenth, linear down to a thousandth of the peak) or constant.
        warmup_fraction: share of all steps in which onecycle rises.
        weight_decay: L2 penalty, by SGD.
        nesterov: whether the momentum is Nesterov's.
        clip_norm: to which a gradient is shortened whose Euclidean norm, over all weights, is larger; 0 is off.
        train_fraction: share of the training images that an epoch sees, each epoch others.
        shift_pixels: training images are moved by up to so many pixels, zeros following (a random crop after padding).
        flip: whether every other training image, at random, is mirrored left to right.
        label_smoothing: share of the target that is spread evenly over all classes.
        ema_decay: per step, of the exponential moving average of the weights that is evaluated and returned; 0 is off.
    """

    sgd_momentum: float = setting(0.9, minimum=0, below=1)
    learning_rate: float = setting(0.2, above=0)
    model: str = setting("mnist_cnn", choices=MODELS)
    dataset: str = setting("auto", choices=DATASETS)
    schedule: str = setting("onecycle", choices=SCHEDULES)
    warmup_fraction: float = setting(0.25, above=0, below=1)
    weight_decay: float = setting(5e-5, minimum=0)
    nesterov: bool = setting(True)
    clip_norm: float = setting(0.5, minimum=0)
    train_fraction: float = setting(1.0, above=0, maximum=1)
    shift_pixels: int = setting(0, minimum=0, maximum=8)
    flip: bool = setting(False)
    label_smoothing: float = setting(0.1, minimum=0, below=1)
    ema_decay: float = setting(0.0, minimum=0, below=1)


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
class RunOptions(Settings):
    """How to run it; the result is the same up to rounding, so the cache ignores these.

    Attributes:
        nproc: ranks to spawn; 0 is one per visible GPU, or two where there is none.
        timeout_seconds: how long the ranks may go without a step before the run counts as hung.
        checkpoint_seconds: time between two checkpoints within an epoch (each epoch's end has one anyway).
        resume: whether to go on from the checkpoint that an earlier, unfinished run of the same training left.
        tracking: online and offline are Weights & Biases; auto is online where it has a key, else off; tensorboard
            writes event files.
        wandb_project: the W&B project; empty is WANDB_PROJECT, else flyte-ddp.
        wandb_entity: the W&B user or team; empty is WANDB_ENTITY, else the key's own.
        profile: whether torch.profiler looks at some steps of every rank.
    """

    nproc: int = setting(0, minimum=0, maximum=1024)
    timeout_seconds: float = setting(300.0, minimum=1, maximum=86400)
    checkpoint_seconds: float = setting(30.0, minimum=0)
    resume: bool = setting(True)
    tracking: str = setting("auto", choices=TRACKING)
    wandb_project: str = setting("")
    wandb_entity: str = setting("")
    profile: bool = setting(False)
