"""The private parts of torch's compiler that this package uses, as of version 2.15.0: see tests/compat."""

from typing import Any

import torch
from torch import nn


def uncompiled(module: Any) -> Any:
    """Return the network that torch.compile was given for this one; anything else as it is."""
    return getattr(module, "_orig_mod", module)


def records_graphs(module: nn.Module) -> bool:
    """Return whether torch.compile was told to record a layer into CUDA graphs, as by mode="reduce-overhead"."""
    compiled = module, module._compiled_call_impl, vars(module).get("forward")
    asked = [getattr(one, "__dict__", {}).get("get_compiler_config") for one in compiled]
    return any(ask is not None and (ask() or {}).get("triton.cudagraphs") for ask in asked)


def allow_compiling(times: int) -> None:
    """Let torch.compile compile the same code so many times, and make it choose kernels deterministically.

    Beyond its limit, torch.compile would run the code uncompiled. If it chose kernels by measuring them, the same step
    would round differently after another start.

    Args:
        times: the limit to set, unless torch's is higher.
    """
    config = torch._dynamo.config
    torch._inductor.config.deterministic = True
    config.recompile_limit = max(config.recompile_limit, times)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, times)
