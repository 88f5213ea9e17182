"""The private parts of torch's compiler that this package uses, as of version 2.15.0: see tests/compat.

What traces a network gives its graph to a backend, with tensors that have shapes alone, some of whose lengths may have
any value.
"""

from typing import Any

import torch
from torch import nn


def uncompiled(module: Any) -> Any:
    """The network that torch.compile has been given, of what it has returned; anything else as it is."""
    return getattr(module, "_orig_mod", module)


def records_graphs(module: nn.Module) -> bool:
    """Whether torch compiles it, its calls or its forward into CUDA graphs, as in the mode reduce-overhead."""
    compiled = module, module._compiled_call_impl, vars(module).get("forward")
    asked = [getattr(one, "__dict__", {}).get("get_compiler_config") for one in compiled]
    return any(ask is not None and (ask() or {}).get("triton.cudagraphs") for ask in asked)


def allow_compiling(times: int) -> None:
    """Lets torch.compile compile the same code so often: past its own limit it would leave it as it is. How it does
    that, it decides without measuring, or the same step would round otherwise after another start."""
    config, torch._inductor.config.deterministic = torch._dynamo.config, True
    config.recompile_limit = max(config.recompile_limit, times)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, times)
