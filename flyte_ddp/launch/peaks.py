"""The peak FLOPS of accelerators, by the names that torch gives them, and how much of it a training uses."""

import re

from flyte_ddp.launch.environment import World

# Floating-point operations per second, dense, from NVIDIA's data sheets: bfloat16 on tensor cores, float32 off them.
# Names must match, but for what says socket and memory (A100-SXM4-80GB). A slice of a GPU has another name.
PEAKS: dict[str, dict[str, float]] = {
    "NVIDIA A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "NVIDIA A100 80GB PCIe": {"bfloat16": 312e12, "float32": 19.5e12},
    "NVIDIA A10": {"bfloat16": 125e12, "float32": 31.2e12},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989.5e12, "float32": 67e12},
    "NVIDIA H100 PCIe": {"bfloat16": 756.5e12, "float32": 51e12},
    "NVIDIA H200": {"bfloat16": 989.5e12, "float32": 67e12},
    "NVIDIA L4": {"bfloat16": 121e12, "float32": 30.3e12},
    "Tesla T4": {"float32": 8.1e12},
}


def peak(device: str, precision: str) -> float | None:
    """Return the peak floating-point operations per second of one accelerator; None if unknown, as for all CPUs."""
    for name, by_precision in PEAKS.items():
        if re.fullmatch(rf"{re.escape(name)}(-[A-Z0-9]+-\d+GB)?", device):
            return by_precision.get(precision)
    return None


def model_flops_utilization(flops: float, device: str, precision: str, world: World) -> float | None:
    """Return the model FLOPs utilization (MFU), the fraction of the GPUs' peak that is used; None if unknown.

    The MFU is known only with NCCL, as ranks may share a GPU with gloo, and only for a GPU whose peak in this precision
    is listed in PEAKS. PaLM defines MFU (Chowdhery et al., 2022, appendix B), but here FLOPs are counted rather than
    estimated.

    Args:
        flops: floating-point operations per second of all ranks together; 0 if unknown.
        device: the GPU's name, as torch gives it.
        precision: the dtype of the arithmetic, such as "bfloat16".
        world: the ranks and their backend.
    """
    most = peak(device, precision) if world.backend == "nccl" else None
    return flops / (most * world.size) if most and flops else None
