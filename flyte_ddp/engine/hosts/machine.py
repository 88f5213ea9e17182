"""The machines that a training has run on: what its bits may depend on, in addition to its identity."""

from collections.abc import Sequence
from typing import Any

import torch

from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.settings import RunOptions


def describe_machine(places: Sequence[Place], precision: str, options: RunOptions) -> dict[str, Any]:
    """Return what all ranks together run on, and what else a result's bits may depend on, as plain values by name.

    Returns:
        "hardware" (each kind of processor once), "torch" (the version), "precision", "ranks" and "threads" (their
        numbers), "sharding" and "compile" (the options).
    """
    return {
        "hardware": " and ".join(dict.fromkeys(place.hardware for place in places)),
        "torch": str(torch.__version__),
        "precision": precision,
        "ranks": len(places),
        "threads": torch.get_num_threads(),
        "sharding": options.sharding,
        "compile": options.compile,
    }


def note_machine(
    ran_on: Sequence[dict[str, Any]], now: dict[str, Any], virtual_ranks: int | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add the present machine to those that a training has run on, and remark on changes that may change its result.

    `ran_on` has what describe_machine() returned at each earlier start that found another machine than the one before.
    virtual_ranks is None if there can be none, as under Lightning; with them the number of ranks changes no result.

    Returns:
        A new list of machines, the present one last and not twice; and a remark each if the hardware or, without
        virtual ranks, the number of ranks is another one than before.
    """
    if not ran_on or ran_on[-1] == now:
        return [*ran_on[:-1], now], []
    before = ran_on[-1]
    remarks = []
    if before["hardware"] != now["hardware"]:
        remarks.append(
            f"The checkpoint is from other hardware ({before['hardware']}) than this ({now['hardware']}): from here "
            "on, bits may differ"
        )
    if before["ranks"] != now["ranks"] and not virtual_ranks:
        remedy = "" if virtual_ranks is None else ", which only virtual_ranks would keep"
        remarks.append(
            f"The checkpoint is from {before['ranks']} ranks, and {now['ranks']} go on from it: the result is not that "
            f"of the former number{remedy}"
        )
    return [*ran_on, now], remarks
