"""The inputs of a training under Lightning. The base of a module's own settings."""

from dataclasses import dataclass

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, is_field, setting
from flyte_ddp.settings import BACKENDS, RunOptions

PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}  # ours: Lightning's
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
ALGORITHMS = ("norm", "value")
GIVEN = ("settings", "data_path", "loader_workers", "pin_memory")  # what a module's __init__ gets besides its settings
# Options that mean nothing to Lightning's Trainer
FOR_RECIPES = {
    "profile": False, "log_gradients": False, "keep_checkpoint": False, "keep_best": 0, "sharding": "off",
    "compile": False, "audit_every": 0, "trace_every": 0,
}  # fmt: skip

# Arguments of Lightning's Trainer that have another name or another place here, and those that have none
CALLED = {
    "devices": "nproc of LightningOptions",
    "accelerator": "backend of LightningSettings, nccl for GPUs and gloo for CPUs",
    "max_epochs": "epochs of LightningSettings",
    "log_every_n_steps": "log_interval of LightningSettings",
    "num_nodes": "the number of nodes of the task",
    "val_check_interval": "the end of each epoch",
    "check_val_every_n_epoch": "1, as each epoch is validated",
    "callbacks": "callbacks of LightningTraining",
    "logger": "tracking of LightningOptions",
}
UNSET = (
    "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run", "overfit_batches", "num_sanity_val_steps",
    "limit_predict_batches", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "deterministic",
    "benchmark", "inference_mode", "use_distributed_sampler", "profiler", "detect_anomaly", "barebones", "plugins",
    "reload_dataloaders_every_n_epochs", "default_root_dir",
)  # fmt: skip


@dataclass(frozen=True)
class LightningSettings(Settings):
    """Settings that determine the result, and so the cache key; arguments of Lightning's Trainer keep their names."""

    stop_after = 0  # of recipes; no field, since it has no type

    backend: str = setting("auto", choices=BACKENDS, help="process group backend; auto is nccl with a GPU, else gloo.")
    seed: int = setting(1, minimum=0, maximum=2**32 - 1, help="of the initial weights and whatever else is drawn.")
    log_interval: int = setting(10, minimum=1, help="steps between two log lines.")
    epochs: int = setting(2, minimum=1, help="the Trainer's max_epochs.")
    precision: str = setting(
        "float32", choices=tuple(PRECISIONS), help="bfloat16 and float16 are mixed with float32; float16 needs a GPU."
    )
    accumulate_grad_batches: int = setting(1, minimum=1, help="batches of each rank whose gradients make one step.")
    gradient_clip_val: float = setting(0.0, minimum=0, help="largest norm, or value, of the gradients; 0 is off.")
    gradient_clip_algorithm: str = setting("norm", choices=ALGORITHMS, help="norm or value.")
    limit_train_batches: float = setting(
        1.0, above=0, help="how many of the training batches to use: up to 1 a share, above 1 a number."
    )
    limit_val_batches: float = setting(
        1.0, minimum=0, help="how many of the validation batches to use: up to 1 a share, above 1 a number."
    )
    limit_test_batches: float = setting(
        1.0, minimum=0, help="how many of the test batches to use: up to 1 a share, above 1 a number."
    )
    sync_batchnorm: bool = setting(False, help="whether batch norm sees the batches of all ranks.")

    @classmethod
    def hint(cls, name: str) -> str:
        return _hint(name, LightningOptions) or super().hint(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in GIVEN:
            if hasattr(self, name):
                raise InputError(f"{type(self).__name__}.{name} needs another name: __init__ gets something else by it")
        for name in LIMITS:
            value = getattr(self, name)
            if value > 1 and not value.is_integer():
                raise InputError(
                    f"{type(self).__name__}.{name} must be a share of at most 1, or a whole number of batches, "
                    f"got {value:g}"
                )

    @property
    def last_epoch(self) -> int:
        """The epoch, from 1, that training ends with, unless a callback ends it before."""
        return self.epochs


@dataclass(frozen=True)
class LightningOptions(RunOptions):
    """Options that say how to run a training.

    The result depends on nproc and strategy, so the cache tells them apart.
    """

    refused = tuple(FOR_RECIPES)

    strategy: str = setting("auto", choices=STRATEGIES, help="Lightning's; auto is ddp for several ranks, else none.")

    @classmethod
    def hint(cls, name: str) -> str:
        return _hint(name, LightningSettings) or super().hint(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, without in FOR_RECIPES.items():
            if getattr(self, name) != without:
                raise InputError(f"{type(self).__name__}.{name} is for recipes, not for Lightning: leave it out")


def _hint(name: str, other: type[Settings]) -> str:
    """Return a hint, in brackets, about a name that the settings or the options don't have.

    Args:
        name: the unknown name. It may be an argument of Lightning's Trainer, or belong to the `other` class.
        other: the class of options if the name was given as a setting, else that of settings.

    Returns:
        The hint with a space before it; "" if neither the Trainer nor `other` has the name.
    """
    if name in CALLED:
        return f" (the Trainer's {name} is {CALLED[name]})"
    if name in UNSET:
        return " (this argument of the Trainer cannot be set: leave it out)"
    return f" ({other.__name__} has it)" if is_field(other, name) else ""
