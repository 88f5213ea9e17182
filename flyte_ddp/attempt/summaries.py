"""The figures of a training: the typed summaries among a task's outputs."""

from dataclasses import dataclass, field

from flyte_ddp.engine.job import KeptModel
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.peaks import model_flops_utilization
from flyte_ddp.report.goodput import compute_goodput
from flyte_ddp.report.record import RunFinished


@dataclass(frozen=True)
class RunSummary:
    """The figures of any training. pyflyte does not print long fields that the report has.

    Attributes:
        train_samples: number of training samples; 0 if the data do not tell, as with an IterableDataset.
        test_samples: number of test samples.
        train_seconds: seconds in the training loops alone, as in the report and on the terminal.
        total_seconds: seconds of the whole task.
        seconds: seconds of all attempts, by the causes in flyte_ddp.report.goodput.
        goodput: the share of steps and evaluations in these seconds, from 0 to 1.
        samples_per_second: training samples, all ranks together, per second of train_seconds.
        tokens_per_second: tokens of these samples per second; None where they are not counted.
        world_size: number of ranks.
        backend: nccl or gloo.
        device: cuda or cpu.
        precision: float32, bfloat16 or, under Lightning, float16; empty for a script.
        tracking_url: URL of the Weights & Biases or MLflow run; empty without one.
        warnings: when and why training did not go as it should; empty if all went well.
        validation_samples: size of the validation split; 0 if there is none.
        best_epoch: the evaluation, one per epoch by default, of the returned weights, from 1; 0 without a validation
            split, and under Lightning if it is the last.
        kept: the models that options.keep_best has left in the logs, the best first: file, epoch, measure and value.
        parameters: number of the network's parameters.
        sample_flops: counted floating-point operations of a training step, forward and backward, per sample.
        peak_memory: peak memory of each rank's process, in bytes, by rank.
        peak_gpu_memory: peak memory of each rank's tensors on its GPU, in bytes, by rank; 0 on a CPU.
        skipped_updates: how many updates were left out, see the setting skip_spikes.
        digest: digest of the returned weights, 16 hex digits: equal bits have equal digests.
        lower_is_better: names of the measures besides the loss of which the recipe says so.
        mfu: model FLOPs utilization, from 0 to 1; None if flyte_ddp.launch.peaks does not know the GPUs' peak.
    """

    train_samples: int
    test_samples: int
    train_seconds: float
    total_seconds: float
    seconds: dict[str, float] = field(repr=False)
    goodput: float
    samples_per_second: float = field(repr=False)
    tokens_per_second: float | None = field(repr=False)
    world_size: int
    backend: str
    device: str
    precision: str
    tracking_url: str
    warnings: list[str]
    validation_samples: int = field(repr=False)
    best_epoch: int
    kept: list[KeptModel] = field(repr=False)
    parameters: int = field(repr=False)
    sample_flops: float = field(repr=False)
    peak_memory: list[int] = field(repr=False)
    peak_gpu_memory: list[int] = field(repr=False)
    skipped_updates: int = field(repr=False)
    digest: str
    lower_is_better: list[str] = field(repr=False)
    mfu: float | None = field(repr=False)


@dataclass(frozen=True)
class TrainingSummary(RunSummary):
    """The figures of an image classifier's training.

    Attributes:
        dataset: the dataset that the model was trained on (digits if it stood in for MNIST).
        test_loss: mean loss on the test images, with the returned weights.
        accuracy: share of the test images that these weights classify correctly, from 0 to 1.
        class_accuracies: accuracy on each class that has test images, by name.
    """

    dataset: str
    test_loss: float
    accuracy: float
    class_accuracies: dict[str, float] = field(repr=False)


@dataclass(frozen=True)
class RecipeSummary(RunSummary):
    """The figures of a recipe's training.

    Attributes:
        recipe: the recipe's name.
        measures: measures of the test samples with the returned weights, by name.
        validation_measures: measures of the validation samples with the same weights; empty without a validation split.
    """

    recipe: str
    measures: dict[str, float]
    validation_measures: dict[str, float]


def summarise(world: World, finished: RunFinished, tracking_url: str) -> RunSummary:
    result = finished.results[0]
    train_seconds = sum(epoch.train_seconds for epoch in result.epochs)
    samples = sum(epoch.samples for epoch in result.epochs)
    rate = samples / train_seconds if samples else 0.0  # a user's own loop may end without a step
    return RunSummary(
        train_samples=result.train_samples,
        test_samples=result.test_samples,
        train_seconds=train_seconds,
        total_seconds=finished.total_seconds,
        seconds=finished.seconds,
        goodput=compute_goodput(finished.seconds),
        samples_per_second=rate,
        tokens_per_second=result.tokens / train_seconds if result.tokens and train_seconds else None,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=result.precision,
        tracking_url=tracking_url,
        warnings=[warning.reason for warning in result.warnings],
        validation_samples=result.validation_samples,
        best_epoch=0 if result.chosen_epoch is None else result.chosen_epoch + 1,
        kept=result.kept,
        parameters=result.parameters,
        sample_flops=result.sample_flops,
        peak_memory=[one.peak_bytes for one in finished.results],
        peak_gpu_memory=[one.peak_gpu_bytes for one in finished.results],
        skipped_updates=result.skipped_updates,
        digest=result.digest,
        lower_is_better=result.lower_is_better,
        mfu=model_flops_utilization(result.sample_flops * rate, result.hardware, result.precision, world),
    )
