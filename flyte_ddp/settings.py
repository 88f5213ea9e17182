"""The inputs of a training: settings, which determine its result, and options, which say how to run it."""

from dataclasses import dataclass

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, is_field, setting

BACKENDS = ("auto", "gloo", "nccl")
PRECISIONS = ("auto", "float32", "bfloat16")
TRACKING = ("auto", "online", "offline", "tensorboard", "mlflow", "off")
SHARDING = ("off", "full", "hybrid")
LEAST_SPIKE = 3  # standard deviations


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """The settings that determine the result of any training, and so the cache key.

    A recipe's own settings derive from it.
    """

    backend: str = setting("auto", choices=BACKENDS, help="process group backend; auto is nccl with a GPU, else gloo.")
    seed: int = setting(1, minimum=0, maximum=2**32 - 1, help="seeds initial weights, shuffling and augmentation.")
    log_interval: int = setting(10, minimum=1, help="steps between two log lines.")
    batch_size: int = setting(128, minimum=1, help="samples of one optimizer step, all ranks together.")
    test_batch_size: int = setting(1000, minimum=1, help="samples of one evaluation batch, all ranks together.")
    epochs: int = setting(2, minimum=1, help="passes over the training samples.")
    virtual_ranks: int = setting(
        0,
        minimum=0,
        help="the number of parts that a global batch is computed in, as if DistributedDataParallel had so many ranks. "
        "On any number of ranks up to it, the result has the same bits. 0 is plain DistributedDataParallel, in "
        "which each rank draws for itself, and batch norm sees the rank's own samples.",
    )
    threads: int = setting(
        0,
        minimum=0,
        help="torch's threads in each rank. 0 is the machine's cores divided by its ranks; with virtual_ranks it is "
        "one, because kernels add in another order on more threads.",
    )
    stop_after: int = setting(
        0,
        minimum=0,
        help="training stops after this many epochs, although its schedule goes on to epochs; 0 is off. It leaves "
        "final-checkpoint in its logs, from which the same settings with a later stop, or none, continue.",
    )
    evaluations_per_epoch: int = setting(
        1,
        minimum=1,
        help="how often an epoch is evaluated, at equal distances, the last time at its end. All that happens after an "
        "epoch happens after each evaluation: best weights are chosen, and patience counts evaluations.",
    )
    precision: str = setting(
        "auto",
        choices=PRECISIONS,
        help="of the forward and backward pass; auto is bfloat16 if all ranks' hardware supports it. A resume keeps "
        "the checkpoint's precision.",
    )
    validation_fraction: float = setting(
        0.0,
        minimum=0,
        below=1,
        help="share of the training samples that are held out to choose the best epoch by, the same ones for any seed. "
        "With 0 there is no validation split, and each epoch is evaluated on the test split.",
    )
    choose_by: str = setting(
        "headline",
        choices=("headline", "loss"),
        help="the measure that the best epoch is chosen by: the headline measure or the loss.",
    )
    patience: int = setting(
        0,
        minimum=0,
        help="training ends after this many evaluations without an improvement on the validation split; 0 is off.",
    )
    minimum_delta: float = setting(0.0, minimum=0, help="an improvement counts only if it is greater than this.")
    skip_spikes: float = setting(
        0.0,
        minimum=0,
        help="the update of a step is left out if the norm of its gradients is more than this many standard deviations "
        "above the running mean of those before; 0 is off.",
    )
    freeze: str = setting(
        "", help="patterns (fnmatch) of the names of layers or parameters that are not trained, separated by commas."
    )
    init_leave_out: str = setting(
        "",
        help="patterns (fnmatch) of the names of tensors that are not taken from init but initialised anew, separated "
        'by commas; "mismatching" stands for all tensors that init lacks or has in another shape.',
    )

    @classmethod
    def hint(cls, name: str) -> str:
        return " (RunOptions has it)" if is_field(RunOptions, name) else super().hint(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_ranks > self.batch_size:
            raise InputError(
                f"{type(self).__name__}.virtual_ranks must be at most batch_size ({self.batch_size}), got "
                f"{self.virtual_ranks}: lower it, or raise batch_size"
            )
        if self.stop_after > self.epochs:
            raise InputError(
                f"{type(self).__name__}.stop_after must be at most epochs ({self.epochs}), got {self.stop_after}: "
                "lower it, or set it to 0 for all of them"
            )
        if 0 < self.skip_spikes < LEAST_SPIKE:
            raise InputError(
                f"{type(self).__name__}.skip_spikes must be 0 or at least {LEAST_SPIKE} deviations, got "
                f"{self.skip_spikes:g}: with fewer, ordinary steps would be left out; 6 is usual"
            )

    @property
    def last_epoch(self) -> int:
        """Return the epoch, from 1, that training ends with unless early stopping ends it before."""
        return self.stop_after or self.epochs

    def check_validation(self, keep_best: int = 0) -> None:
        """Raise InputError if patience or keep_best is set. Call this method only if there is no validation split.

        Args:
            keep_best: the option RunOptions.keep_best.
        """
        values = {f"{type(self).__name__}.patience": self.patience, "RunOptions.keep_best": keep_best}
        for name, value in values.items():
            if value:
                raise InputError(
                    f"{name} must be 0 without a validation split, got {value}: set validation_fraction, such as 0.1, "
                    "or has_validation in a recipe that has such a split of its own"
                )


@dataclass(frozen=True)
class RunOptions(Settings):
    """The options that say how to run a training.

    The cache ignores them; outputs say on how many ranks a result was computed.
    """

    nproc: int = setting(0, minimum=0, maximum=1024, help="ranks to spawn; 0 is one per visible GPU, else two.")
    timeout_seconds: float = setting(
        300.0, minimum=1, maximum=86400, help="how long the ranks may go without a step before the run counts as hung."
    )
    start_timeout_seconds: float = setting(
        1800.0,
        minimum=1,
        maximum=86400,
        help="how long the ranks may take until their first step, for which they load data and network, resume from a "
        "checkpoint, and try what could fail later; at least timeout_seconds.",
    )
    write_timeout_seconds: float = setting(
        1800.0,
        minimum=1,
        maximum=86400,
        help="how long the ranks may take to write, or upload, a checkpoint or their results.",
    )
    checkpoint_seconds: float = setting(
        30.0, minimum=0, help="time between two checkpoints within an epoch; there is always one at the epoch's end."
    )
    resume: bool = setting(True, help="whether to resume the checkpoint of an unfinished run of the same training.")
    resume_from: str = setting(
        "",
        help="the folder of an unfinished run's checkpoint, in Flyte's storage or on this machine; the run's log and "
        "report name it. A run that was aborted, or ran elsewhere, continues from there. Refused for another "
        "training.",
    )
    tracking: str = setting(
        "auto",
        choices=TRACKING,
        help="online and offline are Weights & Biases; auto is online if W&B has a key, else off; tensorboard writes "
        "event files; mlflow sends to the server that MLFLOW_TRACKING_URI names.",
    )
    wandb_project: str = setting("", help="the W&B project; empty is WANDB_PROJECT, else flyte-ddp.")
    wandb_entity: str = setting("", help="the W&B user or team; empty is WANDB_ENTITY, else the key's own.")
    mlflow_experiment: str = setting("", help="the MLflow experiment; empty is MLFLOW_EXPERIMENT_NAME, else flyte-ddp.")
    profile: bool = setting(False, help="whether torch.profiler records some steps of every rank.")
    log_gradients: bool = setting(
        False, help="whether trackers get each parameter's gradient norm and, after each epoch, its histogram."
    )
    loader_workers: int = setting(
        2,
        minimum=0,
        maximum=64,
        help="processes per rank that read ahead the samples of a Dataset that are not in memory; with 0 the rank "
        "reads them itself. Blocks need none: a thread of the rank reads them ahead.",
    )
    pin_memory: bool = setting(
        True,
        help="whether the loader workers' batches are copied to a GPU from page-locked memory; without a GPU it has no "
        "effect.",
    )
    keep_checkpoint: bool = setting(
        False,
        help="whether to keep the last checkpoint, as final-checkpoint, so that a later training can continue from it.",
    )
    keep_best: int = setting(
        0,
        minimum=0,
        help="how many of the best evaluations on the validation split leave their weights in the logs, the best as "
        "best-1-epoch-N.pt; 0 is none.",
    )
    cache_bytes: int = setting(
        0, minimum=0, help="disk space of each node for Blocks of data; 0 is half of what is free."
    )
    sharding: str = setting(
        "off",
        choices=SHARDING,
        help="for models that are too large for one GPU. With full, each rank keeps a part of the weights, gradients "
        "and optimizer state, and the layers that Recipe.fsdp_units names are made whole one after the other. "
        "With hybrid, the ranks of a node share one copy, and each node has its own.",
    )
    audit_every: int = setting(
        0,
        minimum=0,
        help="after so many steps each time, another rank computes a part of the batch again. If their bits differ, "
        "the attempt ends and names the rank that was wrong. Needs virtual_ranks; 0 is off.",
    )
    trace_every: int = setting(
        0,
        minimum=0,
        help="after so many steps each time, and in the first one, digests of the batch and of each layer's output, "
        "gradient and weights go to trace.jsonl in the logs, by which compare finds the first step and layer in which "
        "two trainings differ; 0 is off.",
    )
    odd_hosts: str = setting(
        "warn",
        choices=("warn", "refuse"),
        help="what happens before the first step if a host, GPU or link differs from the others, such as a slower one: "
        "warn, or refuse, which ends the attempt, so that another one may get other hosts.",
    )
    compile: bool = setting(
        False,
        help="whether torch.compile compiles, one by one, the layers that Recipe.fsdp_units names, or else the "
        "network; for GPUs. Compiled code draws other random numbers, so a resume needs the same choice.",
    )

    @classmethod
    def hint(cls, name: str) -> str:
        return " (TrainingSettings has it)" if is_field(TrainingSettings, name) else super().hint(name)
