"""Queries to NVIDIA's driver through its management library NVML, without CUDA or torch. Light to import."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any


class NvmlError(Exception):
    """A failure to load NVML, or its refusal to answer. The message is the reason."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may open.

    Attributes:
        instances: UUIDs of its MIG devices; None if MIG does not partition it.
    """

    uuid: str
    instances: tuple[str, ...] | None = None


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the module pynvml for a with statement, initialised while the block runs.

    Raises:
        NvmlError: there is no driver or no pynvml, or NVML raises an error in the block.
    """
    try:
        import pynvml
    except ModuleNotFoundError:  # training needs only torch and numpy
        raise NvmlError("nvidia-ml-py is not installed") from None

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        raise NvmlError("there is no NVIDIA driver here (libnvidia-ml.so.1 cannot be loaded)") from None
    except pynvml.NVMLError as error:
        raise NvmlError(f"NVIDIA's driver says: {error}") from None


def handles(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yield a pair of NVML's index and handle for each GPU that this process may open.

    GPUs for which NVML denies permission, such as those of other containers, are left out. NVML's other errors are
    raised.
    """
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError_NoPermission:
            continue
        yield index, handle


def is_divided(nvml: Any, handle: Any) -> bool:
    """Return whether MIG partitions the GPU."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError_NotSupported:  # most kinds of GPU have no MIG
        return False


def list_gpus() -> list[Gpu]:
    """Return the GPUs that this process may open. Raises NvmlError."""
    with open_nvml() as nvml:
        return [
            Gpu(nvml.nvmlDeviceGetUUID(handle), tuple(_instances(nvml, handle)) if is_divided(nvml, handle) else None)
            for _, handle in handles(nvml)
        ]


def _instances(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield the UUIDs of the MIG devices of a GPU."""
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError_NotFound:
            continue
        yield nvml.nvmlDeviceGetUUID(instance)


def why_slow(uuid: str) -> str:
    """Return why the GPU with this UUID keeps its clocks low: "heat", "power" or "heat and power".

    The text is empty if neither is the reason, or if NVML cannot be asked.
    """
    with suppress(NvmlError), open_nvml() as nvml:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(nvml.nvmlDeviceGetHandleByUUID(uuid))
        heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        power = nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        return " and ".join(name for name, bits in {"heat": heat, "power": power}.items() if reasons & bits)
    return ""


def count_cuda_devices(gpus: Sequence[Gpu], visible: str | None) -> int:
    """Return how many devices CUDA offers a process, computed without CUDA.

    A process gets at most one MIG device, and no whole GPU besides it (MIG User Guide, "CUDA Device Enumeration"). A
    GPU in MIG mode without any MIG device does not count.

    Args:
        gpus: the GPUs that the process may open, in NVML's order.
        visible: the process's CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    chosen = [gpu.uuid for gpu in gpus] if visible is None else _chosen(gpus, visible)
    divided = {gpu.uuid: gpu.instances for gpu in gpus if gpu.instances is not None}
    if any(name.startswith("MIG-") or divided.get(name) for name in chosen):
        return 1
    return len(set(chosen) - set(divided))


def _chosen(gpus: Sequence[Gpu], visible: str) -> list[str]:
    """Return the UUIDs of the GPUs and MIG devices that CUDA_VISIBLE_DEVICES chooses, in its order, as CUDA reads it.

    The variable lists indices, or prefixes of the UUIDs of GPUs or MIG devices. The first unknown or ambiguous entry,
    or one of another kind than the first, ends the list. If a device is listed twice, the result is empty.
    """
    chosen: list[str] = []
    words = [word.strip() for word in visible.split(",")]
    for word in words:
        if word[:4] in ("GPU-", "MIG-"):
            known = chain.from_iterable((gpu.uuid, *(gpu.instances or ())) for gpu in gpus)
            names = [name for name in known if name.startswith(word)]
        else:
            index = re.match(r"\+?(\d+)", word)  # C's strtoul, which takes "1gpu" for 1
            names = [gpu.uuid for number, gpu in enumerate(gpus) if index and number == int(index[1])]
        if len(names) != 1 or (word[:4] != words[0][:4] and {word[:4], words[0][:4]} & {"GPU-", "MIG-"}):
            break
        if names[0] in chosen:
            return []
        chosen += names
    return chosen
