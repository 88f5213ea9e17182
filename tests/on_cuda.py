"""What CUDA refuses and a CPU does not, for tests on machines without a GPU."""

from typing import Any

import torch

from flyte_ddp.engine.torch_compat import TorchDispatchMode, arguments_of

# By operator: what it must be given. batch_norm_backward_cuda: "save_mean should always be defined"
NEEDED = {torch.ops.aten.native_batch_norm_backward.default: ("save_mean", "save_invstd")}


class AsOnCuda(TorchDispatchMode):
    """While the block runs, operators refuse arguments as their CUDA kernels do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in NEEDED.get(func, ()):
            if arguments_of(func, args, kwargs or {}).get(name) is None:
                raise RuntimeError(f"{func}: CUDA needs {name}")
        return func(*args, **(kwargs or {}))
