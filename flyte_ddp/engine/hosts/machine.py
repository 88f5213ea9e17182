"""On what a training has run: what its bits may depend on, besides its identity."""

from collections.abc import Sequence
from typing import Any

import torch

from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.settings import RunOptions


def machine(places: Sequence[Place], precision: str, options: RunOptions) -> dict[str, Any]:
    """What all ranks run on, in plain values."""
    return {
        "hardware": " and ".join(dict.fromkeys(place.hardware for place in places)),
        "torch": str(torch.__version__),
        "precision": precision,
        "ranks": len(places),
        "threads": torch.get_num_threads(),
        "sharding": options.sharding,
        "compile": options.compile,
    }


def moved(ran_on: Sequence[dict[str, Any]], now: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """What a training has run on, with what it runs on now as the last; and a remark, if that is other hardware."""
    if not ran_on or ran_on[-1] == now:
        return [*ran_on[:-1], now], []
    before, here = ran_on[-1]["hardware"], now["hardware"]
    remark = f"The checkpoint is from other hardware ({before}) than this ({here}): from here on, bits may differ"
    return [*ran_on, now], [remark] if before != here else []
