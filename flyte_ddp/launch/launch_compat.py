"""The private parts of Python, multiprocessing and torch that this room uses, without importing torch.

tests/compat/test_launch.py tests them.
"""

import json
import multiprocessing.process
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flyte_ddp.launch.hangs import Answer


def locate_rank(local_rank: int) -> Answer:
    """Return the answer of this rank, without stack and phase, from any of its threads.

    Torch counts and records collectives, even DistributedDataParallel's. Without a process group none is reached. The
    collective is empty, too, if TORCH_FR_BUFFER_SIZE=0 switches torch's recorder off.

    Args:
        local_rank: this rank on its host, which tells its GPU.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return Answer(reached=0, is_idle=True)
    is_idle = True
    if torch.cuda.is_initialized():
        is_idle = torch.cuda.default_stream(local_rank % torch.cuda.device_count()).query()
    collective = ""
    with suppress(Exception):  # another version of torch may raise anything; the report can do without the collective
        collective = _last_collective(torch)
    return Answer(torch.distributed.group.WORLD._get_sequence_number_for_group(), is_idle, collective)


def _last_collective(torch: Any) -> str:
    """Return the collective that this rank waits in, such as "gloo:all_reduce of Float [8]"; empty if none is recorded.

    NCCL lists collectives until they end, so the first one is meant. gloo lists ended ones, too, so the last is.
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
    """Return the stack of a thread of this process as a traceback shows it; empty if no thread has this ident."""
    frame = sys._current_frames().get(thread or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


@contextmanager
def restarts_only(is_worth_it: Callable[[Any], bool]) -> Iterator[None]:
    """Let agents of torch's elastic_launch, started in the block, restart ranks only if is_worth_it(ChildFailedError).

    The block replaces torch's agent class, because max_restarts alone would start ranks again after an error in the
    user's code, too: the agent has no setting for that, and elastic_launch does not give its caller the agent (torch
    2.15).
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
    """Keep this process from waiting at its exit for a multiprocessing.Process that does not end."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
