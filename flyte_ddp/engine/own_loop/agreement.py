"""Checks that all ranks do the same in a loop of the user's own, before they exchange what would not fit together."""

from collections.abc import Collection
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


def agree(call: Call, epoch: int, step: int, device: torch.device) -> bool:
    """Check that all ranks do the same thing now; a collective.

    With one rank nothing is checked. Without this check gloo would abort the process when ranks differ. Under NCCL
    nothing is checked within a step (BACKWARD and STEP_END), because the host would have to wait for the device. Ranks
    that differ hang there, and the report of the hang has their stacks.

    A rank that does anything but BATCH waits here while others are in an evaluation (BATCH), until these have left it.
    The message names the epoch, from 0, and how many of its steps are done.

    Returns:
        True if all ranks do the same, or nothing was checked. False if call is BATCH, and another rank does something
        else.

    Raises:
        InputError: Ranks do different things, and none is in an evaluation. All ranks raise it.
    """
    is_in_step = call in (Call.BACKWARD, Call.STEP_END)
    if distributed.get_world_size() == 1 or (is_in_step and distributed.get_backend() != "gloo"):
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


def names_on_all_ranks(call: str, names: Collection[str], may_lack: bool = False) -> list[str]:
    """Return the names of measures in rank 0's order, because values are summed by position; a collective.

    The result is the same list on all ranks. `call` is the method that the user has given the names to, for the
    message, such as "loop.log". With may_lack, which is the same on all ranks, another rank than 0 may have no
    measures, as one without samples has none.

    Raises:
        InputError: A rank has other names than rank 0. All ranks raise it.
    """
    of_ranks: list[list[str]] = gather_values([*names])
    for rank, others in enumerate(of_ranks):
        if {*others} != {*of_ranks[0]} and not (may_lack and not others):
            got = f"{', '.join(of_ranks[0]) or 'none'} on rank 0 and {', '.join(others) or 'none'} on rank {rank}"
            raise InputError(
                f"{call} must have the same measures on all ranks, got {got}: what one rank alone measures is nobody "
                "else's to add up; in loop.evaluated the others may give it without samples, as (0.0, 0)"
            )
    return of_ranks[0]
