"""Float32 arithmetic on GPUs: IEEE precision and reproducible bits."""

import torch


def settle_arithmetic() -> None:
    """Turns TF32 off and makes cuDNN deterministic; a recipe may set the flags otherwise.

    By default cuDNN's convolutions use TF32, with its 10-bit mantissa, on GPUs that have it, and algorithms that add in
    any order. Operations for which torch has no deterministic version on a GPU (see torch.use_deterministic_algorithms)
    stay as they are: the same bits are promised on CPUs, and on GPUs for trainings without such operations.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
