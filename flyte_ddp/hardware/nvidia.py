"""What NVIDIA's driver says about the GPUs: all of them, whatever CUDA_VISIBLE_DEVICES says."""

import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from flyte_ddp.launch.nvml import NvmlError, handles, open_nvml

T = TypeVar("T")

SECONDS = 30.0  # for an answer: without a persistence daemon it takes one or two, with a broken GPU forever
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
MIB = 2**20


class UnknownError(Exception):
    """Something could not be found out; the message is the reason."""

    def __str__(self) -> str:
        return f"not known: {first_line(str(self.args[0]))}"


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver knows it; all text, because each may be an answer such as "[Not Supported]"."""

    index: str
    name: str
    memory_mib: str
    used_mib: str
    mig: str
    driver: str


def answer(question: Callable[[Any], T]) -> T:
    """The answer to a question that is called with NVML (module pynvml); raises UnknownError.

    It runs in a thread of its own, which is abandoned if a broken GPU keeps NVML from returning.
    """
    answered: Future[T] = Future()

    def ask() -> None:
        try:
            with open_nvml() as nvml:
                answered.set_result(question(nvml))
        except BaseException as error:
            answered.set_exception(error)

    threading.Thread(target=ask, name="NVML", daemon=True).start()
    try:
        return answered.result(SECONDS)
    except NvmlError as failed:
        raise UnknownError(str(failed)) from None
    except TimeoutError:
        raise UnknownError(f"NVIDIA's driver gave no answer within {SECONDS:g} s") from None


def gpus(nvml: Any) -> list[DriverGpu]:
    return [_gpu(nvml, index, handle) for index, handle in handles(nvml)]


def _gpu(nvml: Any, index: int, handle: Any) -> DriverGpu:
    def said(ask: Callable[..., Any], *arguments: Any) -> str:
        try:
            return str(ask(*arguments))
        except nvml.NVMLError as error:
            return f"[{error}]"

    def memory() -> Any:  # the first version of this call counts what the driver reserves as used
        return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)

    return DriverGpu(
        index=str(index),
        name=said(nvml.nvmlDeviceGetName, handle),
        memory_mib=said(lambda: memory().total // MIB),
        used_mib=said(lambda: memory().used // MIB),
        mig=said(lambda: ("Disabled", "Enabled")[nvml.nvmlDeviceGetMigMode(handle)[0]]),
        driver=said(nvml.nvmlSystemGetDriverVersion),
    )


def cuda(nvml: Any) -> str:
    """The newest CUDA that the driver can run."""
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def topology(_: Any) -> str:
    """What `nvidia-smi topo -m` prints: how the GPUs are connected, with its own legend."""
    command = ["nvidia-smi", "topo", "-m"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UnknownError(f"nvidia-smi ended with status {done.returncode}: {done.stdout.strip()}")
    return ESCAPES.sub("", done.stdout).expandtabs().strip("\n")


def first_line(text: str) -> str:
    """The first line that is not empty, shortened."""
    line = next((line.strip() for line in ESCAPES.sub("", text).splitlines() if line.strip()), "")
    return line if len(line) <= 160 else line[:157] + "..."
