"""A check that losses and weights are finite, whoever optimizes and whatever is logged."""

import math
from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer

from flyte_ddp.engine.sharding.sharding import local
from flyte_ddp.errors import NonFiniteError


def broken(measures: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return the names of losses, one for each loader, and of other measures that are not finite."""
    names = [name for name, value in measures.items() if not math.isfinite(value)]
    losses = [name for name in names if name.partition("/")[0] == "loss"]
    return losses, [name for name in names if name not in losses]


def check_finite(
    trainer: Trainer,
    module: LightningModule,
    trained: Mapping[str, float],
    validation: Mapping[str, float],
    epoch: int,
    steps: int,
) -> None:
    """Raise NonFiniteError on all ranks if a loss, or a weight that is trained, is not finite on any; a collective.

    Args:
        trainer: the trainer of the module.
        module: has the weights.
        trained: the measures that training steps have logged last.
        validation: the measures of the last validation; empty if only training is looked at.
        epoch: the number of the epoch, from 0.
        steps: the number of the epoch's steps that are done.
    """
    weights = [local(weight.detach()) for weight in module.parameters() if weight.requires_grad]
    is_bad = not all(bool(weight.isfinite().all()) for weight in weights)
    own_flags = [float(is_bad), float(bool(broken(trained)[0])), float(bool(broken(validation)[0]))]
    flags = torch.zeros(trainer.world_size, len(own_flags), dtype=torch.float64, device=trainer.strategy.root_device)
    flags[trainer.global_rank] = torch.tensor(own_flags, dtype=torch.float64)
    total: torch.Tensor = trainer.strategy.reduce(flags, reduce_op="sum")
    weight, loss, evaluation = ([rank for rank, flag in enumerate(column) if flag] for column in total.T.tolist())
    for what, ranks in (("a weight", weight), ("loss", loss)):
        if ranks:
            raise NonFiniteError.in_step(what, ranks, epoch, steps - 1)
    if evaluation:
        value = next((validation[name] for name in broken(validation)[0]), math.nan)
        raise NonFiniteError.in_evaluation(value, "validation", epoch + 1)
