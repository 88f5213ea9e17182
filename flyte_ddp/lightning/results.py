"""The events that tell the parent of a training's start and end."""

import time
from collections.abc import Sized
from typing import Any

import torch
from lightning import __version__
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from flyte_ddp.engine.hosts.places import hardware
from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.engine.progress import layers_of
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.events import EpochFinished, RunStarted, Warned
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.lightning.job import LightningJob


def run_started(
    environment: Environment,
    job: LightningJob,
    trainer: Trainer,
    first_epoch: int,
    first_step: int,
    hosts: list[str],
) -> RunStarted:
    world, steps, loader = environment.world, int(trainer.num_training_batches), trainer.train_dataloader
    train_samples = samples_of(loader)
    return RunStarted(
        dataset=job.dataset,
        samples="samples",
        headline=job.headline,
        percent=job.percent,
        train_samples=train_samples,
        test_samples=0,  # the test split is opened once training has ended
        samples_per_epoch=round(steps * world.size * (getattr(loader, "batch_size", None) or 0)) or train_samples,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=job.settings.precision,
        epochs=trainer.max_epochs or job.settings.epochs,  # a callback may add one, as for batch norm under SWA
        steps_per_epoch=steps,
        first_epoch=first_epoch,
        first_step=first_step,
        startup_seconds=time.time() - job.launched,
        layers=layers_of(trainer.lightning_module),
        validation_samples=samples_of(trainer.val_dataloaders),
        identity=job.identity,
        remarks=[f"under Lightning {__version__}, {type(trainer.strategy).__name__}"],
        hosts=hosts,
        may_end_early=any(isinstance(one, EarlyStopping) for one in trainer.callbacks),  # type: ignore[attr-defined]
    )


def result_of(
    job: LightningJob,
    trainer: Trainer,
    module: LightningModule,
    started: RunStarted,
    epochs: list[EpochFinished],
    warnings: list[Warned],
    tested: dict[str, float],
    digest: str,
) -> TrainingResult:
    device = trainer.strategy.root_device
    return TrainingResult(
        epochs=epochs,
        warnings=warnings,
        headline=job.headline,
        train_samples=started.train_samples,
        test_samples=samples_of(trainer.test_dataloaders),
        precision=job.settings.precision,
        peak_bytes=peak_memory(),
        peak_gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        validation_samples=started.validation_samples,
        tested=tested,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        hardware=hardware(device),
        digest=digest,
    )


def samples_of(loaders: Any) -> int:
    """Return the number of samples that loaders read, nested as Lightning takes them; 0 where it is unknown."""
    datasets = [getattr(loader, "dataset", None) for loader in pytree.tree_leaves(loaders)]
    return sum(len(dataset) for dataset in datasets if isinstance(dataset, Sized))
