"""The private parts of multiprocessing and torch that the launcher uses, without importing torch: see tests/compat."""

import multiprocessing.process
import sys
from typing import Any


def standing(local_rank: int) -> tuple[int, bool]:
    """How many collectives this rank has reached, and whether its GPU is idle (always true on a CPU).

    torch itself counts them, including those of DistributedDataParallel.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return 0, True
    is_idle = True
    if torch.cuda.is_initialized():
        is_idle = torch.cuda.default_stream(local_rank % torch.cuda.device_count()).query()
    return torch.distributed.group.WORLD._get_sequence_number_for_group(), is_idle


def leave_behind(process: Any) -> None:
    """Keeps this process from waiting, when it exits, for a child that does not end."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
