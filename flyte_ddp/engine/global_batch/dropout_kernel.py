"""Dropout on a GPU: one kernel that draws and multiplies, forward and backward, so that no mask is stored."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyte_ddp import random_numbers

BLOCK = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # a scale for float64 would have the digits of a float32
INCREMENT = tl.constexpr(random_numbers.INCREMENT)
(SHIFT, FACTOR), (SECOND_SHIFT, SECOND_FACTOR) = (
    (tl.constexpr(shift), tl.constexpr(factor)) for shift, factor in random_numbers.ROUNDS
)
LAST_SHIFT = tl.constexpr(random_numbers.LAST_SHIFT)


class Dropout(torch.autograd.Function):
    """features with a share p zeroed and the rest scaled up: the numbers are random_numbers.kept's for the position."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, p: float, key: int, first: int) -> Tensor:
        ctx.position = p, key, first
        return _drop(features, *ctx.position)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Dropout.apply(gradient, *ctx.position), None, None, None  # which has a gradient, too


def compile_now() -> None:
    """Raises an exception of any type where the kernel cannot be compiled."""
    _drop(torch.zeros(1, device="cuda"), 0.5, 0, 0)


def _drop(features: Tensor, p: float, key: int, first: int) -> Tensor:
    features = features.contiguous()
    dropped, (threshold, scale) = torch.empty_like(features), random_numbers.threshold_of(p)
    blocks = (triton.cdiv(features.numel(), BLOCK),)
    key = random_numbers.signed(key)
    _kernel[blocks](features, dropped, key, first, features.numel(), threshold, scale, BLOCK)
    return dropped


@triton.jit(do_not_specialize=["key", "first", "count", "threshold"])  # or it would be compiled for each of them
def _kernel(features, dropped, key, first, count, threshold, scale, block: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    element = (first + index).to(tl.uint64)
    word = (element // 4 + 1) * INCREMENT + key.to(tl.uint64)
    word = (word ^ (word >> SHIFT)) * FACTOR
    word = (word ^ (word >> SECOND_SHIFT)) * SECOND_FACTOR
    word = word ^ (word >> LAST_SHIFT)
    # as int16, of which random_numbers compares with the threshold less 2^15
    piece = ((word >> (element % 4 * 16)) + 0x8000) & 0xFFFF
    values = tl.load(features + index, index < count)
    # multiplied, as torch's operations do: what is not finite stays so
    factors = tl.where(piece >= threshold, scale, 0.0).to(values.dtype)
    tl.store(dropped + index, values * factors, index < count)
