"""What a loop of the user's own has come to."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from flyte_ddp.engine.hosts.places import hardware
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.results import export_model
from flyte_ddp.events import EpochFinished, RunStarted, Warned
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.whole_files import writing_to


def write_model(model: nn.Module, job: Job) -> None:
    """The weights, as a file."""
    with writing_to(Path(job.model_path).parent, job.chosen_by):
        export_model(model.state_dict(), Path(job.model_path))


def result_of(
    started: RunStarted, history: Sequence[EpochFinished], warnings: Sequence[Warned], model: nn.Module,
    device: torch.device, digest: str,
) -> TrainingResult:  # fmt: skip
    """This rank's. digest: of the weights."""
    return TrainingResult(
        epochs=list(history),
        warnings=list(warnings),
        headline=started.headline,
        train_samples=started.train_samples,
        test_samples=started.test_samples,
        precision=started.precision,
        peak_bytes=peak_memory(),
        peak_gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        tested=history[-1].test if history else {},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hardware=hardware(device),
        digest=digest,
    )
