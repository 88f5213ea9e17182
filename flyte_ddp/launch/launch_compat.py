"""The private parts of multiprocessing and torch that the launcher touches, without importing torch.

See tests/test_compat.py.
"""

import multiprocessing.process
import sys
from typing import Any, Tuple


def standing(local_rank: int) -> Tuple[int, bool]:
    """How many collectives this rank has come to, and whether its GPU has done all that it was given.

    torch counts them itself, DistributedDataParallel's own among them. On a CPU all has always been done.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return 0, True
    is_idle = True
    if torch.cuda.is_initialized():
        is_idle = torch.cuda.default_stream(local_rank % torch.cuda.device_count()).query()
    return torch.distributed.group.WORLD._get_sequence_number_for_group(), is_idle


def leave_behind(process: Any) -> None:
    """Has this process, when it exits, not wait for one that does not end."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
