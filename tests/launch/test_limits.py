"""The limits of control groups, in files as the kernel lays them out."""

import math
import sys
from pathlib import Path

import pytest

from flyte_ddp.launch.limits import cpu_limit, memory_kills, peak_memory, usable_memory

MACHINE = usable_memory(Path("/nonexistent"))
NO_LIMIT = "9223372036854771712"


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        # version 2: a container sees its own group as the root
        ({"proc": "0::/", "cpu.max": "150000 100000", "memory.max": "134217728"}, 1.5, 2**27),
        ({"proc": "0::/", "cpu.max": "max 100000", "memory.max": "max"}, math.inf, MACHINE),
        # a pod in a slice: the tightest of all levels counts
        (
            {"proc": "0::/a/b", "a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "a/memory.max": "2097152"},
            4,
            2**21,
        ),
        # version 1, where the path is the host's and only the container's own group is mounted
        (
            {
                "proc": "5:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f",
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "67108864",
            },
            0.5,
            2**26,
        ),
        (
            {
                "proc": "5:memory:/\n4:cpu:/\n0::/",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": NO_LIMIT,
            },
            math.inf,
            MACHINE,
        ),
        ({"proc": "nonsense\n::\n", "cpu.max": "much", "memory.max": ""}, math.inf, MACHINE),
        ({"cpu.max": "200000 100000"}, 2, MACHINE),
    ],
)
def test_the_tightest_limit_counts(tmp_path, files, cores, memory):
    for name, content in files.items():
        file = tmp_path / ("proc/self/cgroup" if name == "proc" else f"sys/fs/cgroup/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    assert cpu_limit(tmp_path) == cores
    assert usable_memory(tmp_path) == memory


@pytest.mark.parametrize(
    ("file", "content", "kills"),
    [
        ("memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0", 2),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1", 1),
        ("memory.events", "nonsense", 0),
        ("memory.max", "max", 0),
    ],
)
def test_processes_killed_for_want_of_memory_are_counted(tmp_path, file, content, kills):
    group = tmp_path / "sys/fs/cgroup" / file
    group.parent.mkdir(parents=True)
    group.write_text(content + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/\n0::/\n")
    assert memory_kills(tmp_path) == kills


def test_peak_memory_is_in_bytes_as_each_system_counts_it(monkeypatch):
    block = bytearray(2**28)
    assert len(block) < peak_memory() < 2**36
    linux = peak_memory()
    monkeypatch.setattr(sys, "platform", "darwin")  # whose numbers are bytes, where Linux has KiB
    assert peak_memory() == pytest.approx(linux / 1024, rel=0.1)
