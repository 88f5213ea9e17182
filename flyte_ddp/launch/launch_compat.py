"""The private parts of Python, multiprocessing and torch that this room uses, without importing torch.

tests/compat/test_launch.py tests them.
"""

import atexit
import gc
import io
import json
import multiprocessing.process
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flyte_ddp.launch.hangs import Answer


def locate_rank(local_rank: int) -> Answer:
    """Return how many collectives of all ranks this rank has reached, the last one's name, and whether its GPU is idle.

    Collectives of smaller groups are not counted. Any thread of any rank may call this function, which does not import
    torch. The answer's stack and phase are left empty. Without torch or a process group, the number is 0. The name is
    empty if torch's flight recorder is off (TORCH_FR_BUFFER_SIZE=0) or cannot be read.

    Args:
        local_rank: this rank's number on its host, from which its GPU's number follows.
    """
    torch: Any = sys.modules.get("torch")
    try:
        is_initialized = torch.distributed.is_initialized()
    except AttributeError:  # torch isn't imported, or is just being imported
        is_initialized = False
    if not is_initialized:
        return Answer(reached=0, is_idle=True)
    is_idle = True
    if torch.cuda.is_initialized():
        is_idle = torch.cuda.default_stream(local_rank % torch.cuda.device_count()).query()
    collective = ""
    with suppress(Exception):  # another version of torch may raise anything; the report can do without the collective
        collective = _last_collective(torch)
    return Answer(torch.distributed.group.WORLD._get_sequence_number_for_group(), is_idle, collective)


def count_collectives() -> int:
    """Return how many collectives this rank has reached, in all of its process groups together; 0 without a group.

    Any thread may call this function, even while another thread imports torch or destroys the group.
    """
    torch: Any = sys.modules.get("torch")
    with suppress(Exception):
        if torch.distributed.is_initialized():
            groups = [*torch.distributed.distributed_c10d._world.pg_map]
            return sum(int(group._get_sequence_number_for_group()) for group in groups)
    return 0


def run_exit_handlers() -> None:
    """Wait for this process's threads except daemons, call its exit handlers, and flush its open files.

    Python does this at the end of a program, but not after os._exit, by which a rank ends. Errors of handlers and files
    are not raised.
    """
    # A script may still write its checkpoint in a thread, or have left a file open
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for one in gc.get_objects():
        if issubclass(type(one), io.IOBase):
            with suppress(Exception):  # it may be closed, or its disk full
                one.flush()


def _last_collective(torch: Any) -> str:
    """Return a rank's current or last collective, such as "gloo:all_reduce of Float [8]"; "" if none is recorded.

    The function reads torch's flight recorder. With NCCL, it returns the first collective that has not ended. With
    gloo, it returns the last collective, which may have ended.

    Args:
        torch: the module torch, which this file does not import.

    Raises:
        Exception: any, under a version of torch whose recorder is another one.
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
    """Let torch's elastic_launch restart failed ranks only if is_worth_it returns True; a context manager.

    Call elastic_launch within the block, which replaces torch's agent class.

    Args:
        is_worth_it: gets the ChildFailedError of a node's ranks, and returns whether to restart them.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    # max_restarts alone would also restart ranks after an error in the user's code; torch 2.15 has no setting for that
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
