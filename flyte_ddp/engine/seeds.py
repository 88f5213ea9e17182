"""The seeds of the random numbers that user code draws.

A step's forward and backward passes draw from generators that are seeded by the step and the part of its batch. So a
resumed training draws as an undisturbed one, and with virtual ranks a part draws alike on whichever rank computes it.
"""

import random
from typing import Any

import numpy as np
import torch

from flyte_ddp.engine.torch_compat import device_generator
from flyte_ddp.random_numbers import Use, derive_key


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators of Python, NumPy and torch, on the CPU and the current GPU."""
    on_gpu = _gpu_generator()
    state = on_gpu.get_state() if on_gpu else None
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state(), state


def put_back_generators(states: tuple[Any, ...]) -> None:
    """Restore the states of the global generators that generator_states() has returned."""
    python_state, numpy_state, torch_state, gpu_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(torch_state)
    if on_gpu := _gpu_generator():
        on_gpu.set_state(gpu_state)


def _gpu_generator() -> torch.Generator | None:
    return device_generator(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_initialized() else None


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on the CPU and the current GPU, with 64 bits.

    NumPy's gets the lower 32 bits. A GPU is only seeded if this process has initialized CUDA.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if on_gpu := _gpu_generator():
        on_gpu.manual_seed(seed)


def seed_part(step_seed: int, part: int, call: int = 0) -> None:
    """Seed the global generators of Python, NumPy and torch for one part of a global batch.

    The same three numbers give the same random numbers on any rank.

    Args:
        step_seed: the seed of the step.
        part: the number of the part: the virtual rank or, without virtual ranks, the rank.
        call: the number, from 1, of a call of loop.backward within the step; 0 outside of these calls.
    """
    seed_all(derive_key(Use.PART, step_seed, part, call))
