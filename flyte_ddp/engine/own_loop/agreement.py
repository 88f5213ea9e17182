"""Checks that all ranks do the same in a loop of the user's own, before they exchange what would not fit together."""

from collections.abc import Collection, Sequence
from enum import Enum

import torch
from torch import distributed

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.errors import InputError


class Call(Enum):
    """An action for which a rank needs the others."""

    BACKWARD = "computes gradients"
    STEP_END = "ends the step"
    EVALUATION = "begins an evaluation"
    BATCH = "is in an evaluation"
    EVALUATED = "calls loop.evaluated"
    EPOCH_END = "ends the epoch"
    END = "has returned"


def agree(call: Call, epoch: int, step: int, device: torch.device) -> bool:
    """Check that all ranks have come to the same call; a collective.

    Nothing is checked with a single rank, nor, under NCCL, for the calls BACKWARD, STEP_END and END. While a rank is in
    an evaluation (BATCH), ranks with another call wait for it.

    Args:
        call: what this rank does.
        epoch: the number of the epoch, from 0, for the message.
        step: how many steps of the epoch are done, for the message.
        device: where the collective's tensors are.

    Returns:
        False if this rank is in an evaluation (BATCH) that another rank has left; otherwise True.

    Raises:
        InputError: Ranks have different calls, and none is in an evaluation. All ranks raise it.
    """
    # Without the check, ranks would hang, or gloo would abort the process. Under NCCL the host would have to wait for
    # the device in a step, and at the END another rank may be in a step
    is_beside_step = call in (Call.BACKWARD, Call.STEP_END, Call.END)
    if distributed.get_world_size() == 1 or (is_beside_step and distributed.get_backend() != "gloo"):
        return True
    number = [*Call].index(call)
    while True:
        extremes = torch.tensor([number, -number], device=device)
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            return True
        calls = gather_values(call.value)
        if call == Call.BATCH:
            return False
        if Call.BATCH.value not in calls:
            break
    other = next(rank for rank, does in enumerate(calls) if does != calls[0])
    place = f"after {step} step{'s' * (step != 1)} of epoch {epoch + 1}"
    raise InputError(
        f"ranks must do the same in each step, but {place} rank 0 {calls[0]} and rank {other} {calls[other]}: let each "
        "compute gradients, log and evaluate as often as the others, by a loss times 0.0 where it has nothing to learn "
        "from"
    )


def names_on_all_ranks(call: str, of_ranks: Sequence[Collection[str]], may_lack: bool = False) -> list[str]:
    """Check that all ranks have measures of the same names, and return the names in rank 0's order.

    This is not a collective.

    Args:
        call: the user's call, such as "loop.log", for the message.
        of_ranks: the measures' names on each rank, as gathered from all ranks.
        may_lack: whether a rank other than 0 may have no names.

    Raises:
        InputError: A rank has other names than rank 0. All ranks raise it if they pass the same arguments.
    """
    for rank, others in enumerate(of_ranks):
        if {*others} != {*of_ranks[0]} and not (may_lack and not others):
            got = f"{', '.join(of_ranks[0]) or 'none'} on rank 0 and {', '.join(others) or 'none'} on rank {rank}"
            raise InputError(
                f"{call} must have the same measures on all ranks, got {got}: what one rank alone measures is nobody "
                "else's to add up; in loop.evaluated the others may give it without samples, as (0.0, 0)"
            )
    return [*of_ranks[0]]
