"""Names of a loop's measures, which all ranks have alike."""

from collections.abc import Collection

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.errors import InputError


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
