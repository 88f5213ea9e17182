"""Float32 arithmetic on GPUs: IEEE precision and reproducible bits."""

import os

import torch

from flyte_ddp.engine.torch_compat import prefer_deterministic


def settle_arithmetic() -> None:
    """Turn TF32 off in this process, and make operations deterministic where torch has a deterministic version.

    Afterwards torch warns of each operation on a GPU that has no deterministic version. A recipe may change these
    settings later. Call this function before the first matrix product on a GPU, because cuBLAS then reads the
    environment variable CUBLAS_WORKSPACE_CONFIG. This function sets the variable unless it is set already.
    """
    # By default, cuDNN's convolutions use TF32, with its 10-bit mantissa, and algorithms that add in any order. Matrix
    # products use TF32 in images that set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    # Where a script has set one of the next two, the settings below would follow it
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose algorithms by their time
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    prefer_deterministic()
