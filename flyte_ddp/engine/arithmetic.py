"""Float32 arithmetic on GPUs: IEEE precision and reproducible bits."""

import os

import torch

from flyte_ddp.engine.torch_compat import prefer_deterministic


def settle_arithmetic() -> None:
    """Turn TF32 off, and have operations add in the same order each time where torch can.

    A recipe may set the flags otherwise. This must be called before the first product on a GPU, when cuBLAS reads its
    variable.

    By default cuDNN's convolutions use TF32, with its 10-bit mantissa, on GPUs that have it, and algorithms that add in
    any order; matrix products use TF32 in images that set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. Operations for which torch
    has no deterministic version on a GPU (see torch.use_deterministic_algorithms) stay as they are, and torch warns of
    each. In steps by virtual ranks, which promise the same bits, each such operation is an error: see
    only_deterministic.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # which chooses by time
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    prefer_deterministic()
