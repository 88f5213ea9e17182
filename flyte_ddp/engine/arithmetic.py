"""What a GPU's float32 is, and that the same inputs give the same bits."""

import torch


def settle_arithmetic() -> None:
    """Has float32 mean IEEE's, and cuDNN compute the same bits each time; a recipe may set the flags otherwise.

    cuDNN's convolutions would else take TF32, of 10 bits of mantissa, on GPUs that have it, and algorithms that add in
    any order. What torch itself has no deterministic operation for on a GPU (torch.use_deterministic_algorithms lists
    them) stays as it is: the same bits are promised for a CPU, and for those GPU trainings that do without.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
