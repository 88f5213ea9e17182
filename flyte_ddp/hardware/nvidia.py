"""What NVIDIA's driver says about the GPUs: all of them, whatever CUDA_VISIBLE_DEVICES says."""

import re
import threading
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Callable, Dict, List, TypeVar

from flyte_ddp.launch.nvml import NvmlFailed, handles, open_nvml

T = TypeVar("T")

SECONDS = 30.0  # for an answer: without a persistence daemon it takes one or two, with a broken GPU forever
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
MIB = 2**20
SWITCH = "switch"


class NotKnown(Exception):
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
    """The answer to a question that is called with NVML (module pynvml); raises NotKnown.

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
    except NvmlFailed as failed:
        raise NotKnown(str(failed)) from None
    except TimeoutError:
        raise NotKnown(f"NVIDIA's driver gave no answer within {SECONDS:g} s") from None


def gpus(nvml: Any) -> List[DriverGpu]:
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


def links(nvml: Any) -> Dict[str, List[str]]:
    """For each GPU its connections to all of them in order, in the words of `nvidia-smi topo -m`."""
    found = dict(handles(nvml))
    nvlinks = {index: _nvlinks(nvml, handle) for index, handle in found.items()}
    addresses = {index: nvml.nvmlDeviceGetPciInfo(handle).busId for index, handle in found.items()}

    def link(one: int, other: int) -> str:
        if one == other:
            return "X"
        number = nvlinks[one].count(addresses[other]) or min(nvlinks[i].count(SWITCH) for i in (one, other))
        at = nvml.NVML_P2P_CAPS_INDEX_NVLINK  # a switch may keep its GPUs apart
        if number and nvml.nvmlDeviceGetP2PStatus(found[one], found[other], at) == nvml.NVML_P2P_STATUS_OK:
            return f"NV{number}"
        return _pcie(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor(found[one], found[other]))

    return {f"GPU{one}": [link(one, other) for other in found] for one in found}


def _nvlinks(nvml: Any, handle: Any) -> List[Any]:
    """Where each active NVLink of a GPU leads: the PCI address of another one, or SWITCH."""
    found = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, number):
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number)
            is_switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            found.append(SWITCH if is_switch else nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):  # no NVLink, or not one with this number
            continue
    return found


def _pcie(nvml: Any, ancestor: int) -> str:
    """The connection between two GPUs, named by their nearest common ancestor."""
    return {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }.get(ancestor, f"[level {ancestor}]")


def pairs(links: Dict[str, List[str]]) -> List[str]:
    """The connection of each pair of GPUs."""
    return [list(links.values())[a][b] for a, b in combinations(range(len(links)), 2)]


def first_line(text: str) -> str:
    """The first line that is not empty, shortened."""
    line = next((line.strip() for line in ESCAPES.sub("", text).splitlines() if line.strip()), "")
    return line if len(line) <= 160 else line[:157] + "..."
