"""A container's CPU and memory limits, from control groups version 1 and 2, and its use of them.

Standard library only.
"""

import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def cpu_limit(root: Path = ROOT) -> float:
    """Return how many CPUs' time the container may use, such as 1.5, from its control groups; inf if there is no limit.

    If several groups have limits, the lowest counts. The set of allowed cores is ignored.

    Args:
        root: the folder that has proc and sys.
    """
    limits = [math.inf]
    for group in _groups("cpu", root):
        version_1 = _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        for quota in (version_1, _numbers(group / "cpu.max")):
            if len(quota) == 2 and min(quota) > 0:  # version 1 has -1 if there is no limit
                limits.append(quota[0] / quota[1])
    return min(limits)


def usable_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process and its children may use: the machine's memory, or the lowest limit."""
    limits: list[float] = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory", root):
        limits += _numbers(group / "memory.limit_in_bytes") + _numbers(group / "memory.max")
    return int(min(limits))


def memory_kills(root: Path = ROOT) -> int:
    """Return how many processes of this container the kernel has killed for want of memory; 0 if that is unknown.

    Args:
        root: the folder that has proc and sys.
    """
    counts = [0]
    for group in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                lines = (line.split() for line in (group / name).read_text().splitlines())
                counts += [int(count) for key, count in lines if key == "oom_kill"]
    return max(counts)


def peak_memory() -> int:
    """Return the most bytes that this process ever had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups for "cpu" or "memory", each before its parents.

    Some of the folders may not exist, because a container often does not see the path that its group has on the host.

    Args:
        controller: "cpu" or "memory".
        root: the folder that has proc and sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        inner = Path(path.lstrip("/"))
        # Version 2 has no names. Beside version 1 it is mounted at "unified", and limits neither CPU nor memory.
        base = mounts / controller if names else mounts
        yield from (base / folder for folder in (inner, *inner.parents))


def _numbers(file: Path) -> list[float]:
    """Return the numbers in a file, infinity for "max"; an empty list if the file is missing or has other words."""
    try:
        return [math.inf if word == "max" else int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
