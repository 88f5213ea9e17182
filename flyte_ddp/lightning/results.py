"""The plan of a training under Lightning, as its start tells it."""

from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any

from lightning import __version__
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from flyte_ddp.engine.contracts import Plan
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.lightning.job import LightningJob

SLOW_DATA = "look at what its host reads from, or raise num_workers of the DataLoader"


def make_plan(job: LightningJob, trainer: Trainer) -> Plan:
    """Return the plan of a training that is about to start: its epochs, steps per epoch and sample counts.

    samples_per_epoch is the product of steps, ranks and the loader's batch size, but at most what the samplers of all
    ranks yield together. If the loader has no batch size, samples_per_epoch is the size of the datasets. test_samples
    stays 0, because the test split is opened after the training.
    """
    steps = int(trainer.num_training_batches)
    loader = trainer.train_dataloader
    train_samples = count_samples(loader)
    of_batches = round(steps * trainer.world_size * (getattr(loader, "batch_size", None) or 0))
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, Sized):  # the last batch may have fewer samples
        of_batches = min(of_batches, trainer.world_size * len(sampler))
    return Plan(
        headline=job.headline,
        percent=job.percent,
        precision=job.settings.precision,
        epochs=trainer.max_epochs or job.settings.epochs,  # a callback may add one, as for batch norm under SWA
        steps_per_epoch=steps,
        samples_per_epoch=of_batches or train_samples,
        train_samples=train_samples,
        validation_samples=count_samples(trainer.val_dataloaders),
        may_end_early=any(isinstance(one, EarlyStopping) for one in trainer.callbacks),  # type: ignore[attr-defined]
        remarks=[f"under Lightning {__version__}, {type(trainer.strategy).__name__}"],
        slow_data=SLOW_DATA,
        meets_within=True,  # in the backward pass
    )


def count_samples(loaders: Any) -> int:
    """Return the number of samples in the datasets of all loaders.

    Args:
        loaders: loaders in nested lists and dicts, or None. A loader whose dataset has no length counts as 0.
    """
    datasets = [getattr(loader, "dataset", None) for loader in pytree.tree_leaves(loaders)]
    return sum(len(dataset) for dataset in datasets if isinstance(dataset, Sized))


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first tensor; 1 if no tensor is found.

    Args:
        batch: tensors in lists, tuples and dicts; or a mapping or dataclass of these.
    """
    parts = batch
    if is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]  # with slots it has no vars()
    elif isinstance(batch, Mapping):
        parts = dict(batch)
    return next((len(leaf) for leaf in pytree.tree_leaves(parts) if isinstance(leaf, Tensor) and leaf.ndim), 1)
