"""Where a run took place: versions, hardware, git commit. Whatever is unknown is left out."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import flyte_ddp
from flyte_ddp.launch.environment import available_cores
from flyte_ddp.launch.limits import usable_memory

SHOWN_VERSIONS = ("torch", "torchvision", "flytekit", "numpy", "wandb")


def surroundings() -> dict[str, str]:
    """Label to value, to be shown as they are; takes milliseconds, since it uses neither torch nor the network."""
    found = {"Python": platform.python_version()}
    for name in SHOWN_VERSIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found["System"] = platform.platform(terse=True)
    found["Processor"] = f"{processor()}, {available_cores()} cores usable"
    with suppress(OSError, ValueError):
        found["Memory"] = f"{usable_memory() / 2**30:.0f} GiB"
    gpus = _gpus()
    if gpus:
        found["GPU"] = gpus
    commit = _commit()
    if commit:
        found["Git commit"] = commit
    return found


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> str:
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            names += [
                line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("Model")
            ]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def _commit() -> str:
    """The commit of this code, and whether it has been changed since; in an image it can come only from GIT_COMMIT."""
    root = Path(flyte_ddp.__path__[0]).parent
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
        return answer.stdout.strip() or os.environ.get("GIT_COMMIT", "")
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("GIT_COMMIT", "")
