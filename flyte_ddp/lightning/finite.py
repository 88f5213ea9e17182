"""A check that losses and weights are finite, whoever optimizes and whatever is logged."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from lightning.pytorch import LightningModule

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.sharding.sharding import local
from flyte_ddp.errors import NonFiniteError


class NotFinite(NamedTuple):
    """The names of measures that are NaN or infinite; the losses are "loss" and "loss/dataloader_idx_0" and so on."""

    losses: list[str]
    others: list[str]


def find_not_finite(measures: Mapping[str, float]) -> NotFinite:
    names = [name for name, value in measures.items() if not math.isfinite(value)]
    losses = [name for name in names if name.partition("/")[0] == "loss"]
    return NotFinite(losses, [name for name in names if name not in losses])


def check_finite(
    module: LightningModule,
    trained: Mapping[str, float],
    validation: Mapping[str, float],
    epoch: int,
    steps: int,
) -> None:
    """Raise NonFiniteError on all ranks if a loss or a trained weight is not finite on any rank; a collective.

    The message names the epoch, and the ranks and the step for a weight or a training loss. Measures other than losses
    may be NaN. Losses are named "loss", or for instance "loss/dataloader_idx_0".

    Args:
        module: the module, whose trained weights are checked.
        trained: the measures that training steps have logged last, by name.
        validation: the measures of the last validation, by name; empty to check training alone.
        epoch: the epoch, from 0.
        steps: the number of the epoch's steps that are done.
    """
    weights = [local(weight.detach()) for weight in module.parameters() if weight.requires_grad]
    is_bad = not all(bool(weight.isfinite().all()) for weight in weights)
    own_flags = [is_bad, *(bool(find_not_finite(measures).losses) for measures in (trained, validation))]
    flags = zip(*gather_values(own_flags), strict=True)
    weight, loss, evaluation = ([rank for rank, flag in enumerate(column) if flag] for column in flags)
    for what, ranks in (("a weight", weight), ("loss", loss)):
        if ranks:
            raise NonFiniteError.in_step(what, ranks, epoch, steps - 1)
    if evaluation:
        value = next((validation[name] for name in find_not_finite(validation).losses), math.nan)
        raise NonFiniteError.in_evaluation(value, "validation", epoch + 1)
