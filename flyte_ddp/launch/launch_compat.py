"""The private parts of multiprocessing and torch that the launcher uses, without importing torch.

Tests/compat tests them.
"""

import json
import multiprocessing.process
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def standing(local_rank: int) -> tuple[int, bool, str]:
    """Return this rank's collective progress. Torch counts and records collectives, even DistributedDataParallel's.

    Returns:
        How many collectives this rank has reached; whether its GPU is idle (always true on a CPU); and the collective
            that it is in, with types and shapes, which is empty if it is in none, or TORCH_FR_BUFFER_SIZE=0 switches
            torch's recorder off.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return 0, True, ""
    is_idle = True
    if torch.cuda.is_initialized():
        is_idle = torch.cuda.default_stream(local_rank % torch.cuda.device_count()).query()
    collective = ""
    with suppress(Exception):  # another version of torch may raise anything; the report can do without the collective
        collective = _collective(torch)
    return torch.distributed.group.WORLD._get_sequence_number_for_group(), is_idle, collective


def _collective(torch: Any) -> str:
    """Return the name and tensors of the collective that this rank waits in; empty if none is recorded.

    NCCL lists collectives until they end, so it is the first of them. gloo lists ended ones, too, so it is the last.
    """
    recorders = torch._C._distributed_c10d
    is_nccl = torch.distributed.get_backend() == "nccl"
    dump = recorders._dump_nccl_trace_json if is_nccl else recorders._dump_fr_trace_json
    entries = json.loads(dump(includeCollectives=True, onlyActive=is_nccl)).get("entries", [])
    if not entries:
        return ""
    choose = min if is_nccl else max
    record = choose(entries, key=lambda entry: entry["record_id"])
    name, types, sizes = (record[key] for key in ("profiling_name", "input_dtypes", "input_sizes"))
    tensors = ", ".join(f"{kind} {size}" for kind, size in zip(types, sizes, strict=False))
    return f"{name} of {tensors}" if tensors else str(name)


def read_stack(thread: int | None) -> str:
    """Return the stack of a thread of this process, by its ident; empty if the thread has ended."""
    frame = sys._current_frames().get(thread or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


@contextmanager
def restarts_only(is_worth_it: Callable[[Any], bool]) -> Iterator[None]:
    """Within the block, let torch's elastic agent restart failed ranks only if is_worth_it(their ChildFailedError).

    It replaces torch's agent class, because the agent has no setting for that, and elastic_launch does not give its
    caller the agent (torch 2.15).
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    class Agent(api.LocalElasticAgent):  # type: ignore[name-defined]
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and not (result.failures and is_worth_it(ChildFailedError("ranks", result.failures))):
                self._remaining_restarts = 0
            return result

    own = api.LocalElasticAgent  # type: ignore[attr-defined]
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        yield
    finally:
        api.LocalElasticAgent = own  # type: ignore[attr-defined]


def leave_behind(process: Any) -> None:
    """Keep this process from waiting, when it exits, for a child that does not end."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
