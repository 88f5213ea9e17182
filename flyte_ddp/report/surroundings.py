"""The surroundings of a run: versions, hardware and git commit. Unknown ones are left out."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import flyte_ddp
from flyte_ddp.launch.environment import available_cores
from flyte_ddp.launch.limits import usable_memory
from flyte_ddp.text import gib

SHOWN_VERSIONS = ("torch", "torchvision", "flytekit", "numpy", "wandb")


@cache
def surroundings() -> dict[str, str]:
    """Return versions, hardware and git commit as texts by label, without those that are unknown.

    Neither torch nor the network is needed. All calls return the same dict: do not change it.
    """
    facts = {"Python": platform.python_version()}
    for name in SHOWN_VERSIONS:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    facts["System"] = platform.platform(terse=True)
    facts["Processor"] = f"{processor()}, {available_cores()} cores usable"
    with suppress(OSError, ValueError):
        facts["Memory"] = gib(usable_memory())
    facts |= {"GPU": _gpus(), "Git commit": _commit()}
    return {label: value for label, value in facts.items() if value}


def processor() -> str:
    with suppress(OSError):
        model = re.search(r"^model name\s*:\s*(.+?)\s*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model:
            return model[1]
    return platform.processor() or platform.machine()


def _gpus() -> str:
    """Return each type of GPU with their number: "2 x NVIDIA H200, 1 x NVIDIA T4"; "" without one."""
    names: list[str] = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            names += re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _commit() -> str:
    """Return the first 12 digits of the git commit of this code, with "-dirty" if the code has changed since.

    Outside of a checkout, as in an image, return the environment variable GIT_COMMIT, or "" if it is not set.
    """
    root = Path(flyte_ddp.__path__[0]).parent
    commit = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    return commit or os.environ.get("GIT_COMMIT", "")
