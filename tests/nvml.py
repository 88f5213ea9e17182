"""A stand-in for NVIDIA's driver library, compiled where a test needs it: pynvml itself is the real one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def stand_in(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that finds the stand-in; its variables are told in nvml.c."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler, for a stand-in for libnvidia-ml.so.1")
    folder.mkdir(exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "nvml.c"], check=True)
    mine = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**mine, "LD_LIBRARY_PATH": str(folder), **variables}
