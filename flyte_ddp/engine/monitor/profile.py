"""torch.profiler on a rank: a trace of a few steps, and a table of what they cost."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from flyte_ddp.whole_files import write_whole

# Steps to skip, to warm up the profiler with, and to record: the first ones are not typical
WAIT, WARMUP, ACTIVE = 2, 2, 6
MOST_OPERATORS = 50


@contextmanager
def profiling(folder: str, rank: int, optimizer: Optimizer) -> Iterator[None]:
    """Profile the 5th to 10th steps of an optimizer in the block, and write the results to a folder.

    Use this as a context manager. Each rank writes rank<n>.pt.trace.json, which opens in Perfetto, and in TensorBoard
    with its profiler plugin. Rank 0 adds operators.json, with the most expensive operators. A block of 5 to 9 steps is
    profiled to its end; one of 4 steps leaves a trace alone, and a shorter one nothing. If the results cannot be
    written, that is printed, and no error is raised. A full disk may leave half a trace.

    Args:
        folder: the folder, which is created for the results. With "" nothing is profiled.
        rank: this rank.
        optimizer: the optimizer whose steps are counted.
    """
    if not folder:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # keeps the profiler's library from logging to standard error
    path = Path(folder)

    def write(profiler: Any) -> None:
        steps = profiler.step_num - WAIT - WARMUP  # fewer than ACTIVE if the block has ended before
        try:
            path.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path / f"rank{rank}.pt.trace.json"))
            if rank == 0 and steps:
                content = {"steps": steps, "operators": operators(profiler)}
                write_whole(path / "operators.json", json.dumps(content).encode())
        except OSError as error:  # a disk that is full must neither end the training nor hide how the block has ended
            print(f"{path} lacks the profile of rank {rank}: {error}", file=sys.stderr, flush=True)

    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        handle = optimizer.register_step_post_hook(lambda *_: profiler.step())
        try:
            yield
        finally:
            handle.remove()


def operators(profiler: Any) -> list[dict[str, Any]]:
    """Return the operators that took the most time of their own in the recorded steps, the slowest first.

    At most MOST_OPERATORS are returned. They are sorted by the GPU's time if a GPU was used, else by the CPU's. An
    operator's own time leaves out the operators that it calls.

    Args:
        profiler: the torch.profiler.profile that has recorded.

    Returns:
        A dict for each operator, with sums over all recorded steps: "name", "calls", and times in microseconds.
            "self_cpu_us" and "device_us" are its own time. "cpu_us" includes the operators that it calls.
    """
    rows = [
        {
            "name": row.key,
            "calls": row.count,
            "cpu_us": row.cpu_time_total,
            "self_cpu_us": row.self_cpu_time_total,
            "device_us": row.self_device_time_total,
        }
        for row in profiler.key_averages()
        if not row.key.startswith("ProfilerStep")
    ]
    on_device = any(row["device_us"] for row in rows)
    rows.sort(key=lambda row: -row["device_us" if on_device else "self_cpu_us"])
    return rows[:MOST_OPERATORS]
