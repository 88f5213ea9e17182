"""What came out of a training, in figures: the typed summaries among a task's outputs."""

from dataclasses import dataclass
from typing import Dict, List, Optional

from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.peaks import peak
from flyte_ddp.report.record import RunFinished


@dataclass(frozen=True)
class RunSummary:
    """What came out of any training, in figures.

    Attributes:
        train_samples: number of training samples.
        test_samples: number of test samples.
        train_seconds: in the training loops alone.
        total_seconds: of the whole task.
        samples_per_second: training samples, all ranks together, per second of train_seconds.
        world_size: number of ranks.
        backend: nccl or gloo.
        device: cuda or cpu.
        precision: float32 or bfloat16.
        tracking_url: of the Weights & Biases run; empty without one.
        warnings: when and why the training did not go as it should; empty if all went well.
        validation_samples: number of samples held out to choose the best epoch by.
        best_epoch: the one that they chose, from 1, whose weights are given back; 0 without them, and then the last is.
        parameters: of the network.
        sample_flops: floating-point operations of a training step, forward and backward, per sample, as counted.
        peak_memory: the most bytes that each rank's process has held, by rank.
        utilization: model FLOPs utilization: the share of the GPUs' peak that training has made use of; None where the
            peak is not known, see flyte_ddp.launch.peaks.
    """

    train_samples: int
    test_samples: int
    train_seconds: float
    total_seconds: float
    samples_per_second: float
    world_size: int
    backend: str
    device: str
    precision: str
    tracking_url: str
    warnings: List[str]
    validation_samples: int
    best_epoch: int
    parameters: int
    sample_flops: float
    peak_memory: List[int]
    utilization: Optional[float]


@dataclass(frozen=True)
class TrainingSummary(RunSummary):
    """What came out of training an image classifier, in figures.

    Attributes:
        dataset: what the model was trained on (digits where it stood in for MNIST).
        test_loss: mean loss on the test images, by the weights that are given back.
        accuracy: share of the test images classified correctly by these, from 0 to 1.
        class_accuracies: the same for each class that has test images, by name.
    """

    dataset: str
    test_loss: float
    accuracy: float
    class_accuracies: Dict[str, float]


def summarise(world: World, finished: RunFinished, tracking_url: str) -> RunSummary:
    result = finished.results[0]
    train_seconds = sum(epoch.train_seconds for epoch in result.epochs)
    rate = sum(epoch.samples for epoch in result.epochs) / train_seconds
    return RunSummary(
        train_samples=result.train_samples,
        test_samples=result.test_samples,
        train_seconds=train_seconds,
        total_seconds=finished.total_seconds,
        samples_per_second=rate,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=result.precision,
        tracking_url=tracking_url,
        warnings=[warning.reason for warning in result.warnings],
        validation_samples=result.validation_samples,
        best_epoch=0 if result.chosen_epoch is None else result.chosen_epoch + 1,
        parameters=result.parameters,
        sample_flops=result.sample_flops,
        peak_memory=[one.peak_bytes for one in finished.results],
        utilization=utilization(result, rate, world),
    )


def utilization(result: TrainingResult, samples_per_second: float, world: World) -> Optional[float]:
    """Of the GPUs, one for each rank, as PaLM's authors define it (Chowdhery et al., 2022, appendix B), by what is
    counted rather than estimated."""
    # Ranks under gloo may share a GPU, and then nobody knows how many there are
    most = peak(result.hardware, result.precision) if world.backend == "nccl" else None
    return result.sample_flops * samples_per_second / (most * world.size) if most else None
