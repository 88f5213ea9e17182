"""While a block runs, whatever torch draws or normalises is that of the global batch, whoever wrote the code.

torch's operators are replaced, by its own torch.library, rather than layers or functions of Python: so subclasses,
functional calls, other libraries and torch's own C++ all come here. Outside such a block they do what they always did.
What draws in another way is found by the probe, which refuses it.
"""

import functools
import importlib.util
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batch_norm import batch_norm
from flyte_ddp.engine.torch_compat import any_batch_size, original, plain_attention
from flyte_ddp.errors import InputError

ATTEND = original(torch.ops.aten.scaled_dot_product_attention.default)
NORMALISE_INSTANCES = original(torch.ops.aten.instance_norm.default)

Shape = tuple[int, ...]
# Of a draw's arguments, those after its shape
Numbers = Callable[[int, int, int, torch.device], Tensor]


class Layout(NamedTuple):
    """Where the samples are in what an operation draws.

    Attributes:
        dimension: of the samples; None for numbers that all samples share.
        each: rows per sample in that dimension.
        rest: the other dimensions.
    """

    dimension: int | None
    each: int
    rest: Shape

    def fits(self, shape: Shape, count: int) -> bool:
        if self.dimension is None:
            return shape == self.rest
        rest = shape[: self.dimension] + shape[self.dimension + 1 :]
        return rest == self.rest and shape[self.dimension] == self.each * count


class ByRow:
    """A network's random numbers and batch statistics as those of the global batch, for the samples of a share.

    The numbers of a sample depend on the step's seed, the number of the call and the sample's position alone. Each call
    takes its key from torch's generator, so that activation checkpointing, which sets that back, draws them again.

    Attributes:
        drawn: operation and shape of each draw of the block.
        digest: of these shapes without the samples: the same on all ranks, or their numbers don't belong together.
        normalised: whether any batch was normalised.
    """

    def __init__(self, share: BatchShare):
        _replace_operators()
        self.share = share
        self.drawn: list[tuple[str, Shape]] = []
        self.digest = 0
        self.normalised = False
        self._layouts: dict[tuple[str, int], list[Layout]] = {}  # by operation and number of dimensions
        self._found: dict[tuple[str, Shape, int], Layout] = {}

    @contextmanager
    def block(self, seed: int) -> Iterator[None]:
        """Of a step's forward and backward pass; its seed is the same on all ranks."""
        global _active
        self.drawn, self.digest, outer = [], 0, _active
        torch.default_generator.manual_seed(seed)
        _active = self
        try:
            with any_batch_size():
                yield
        finally:
            _active = outer

    def learn(self, whole: Sequence[tuple[str, Shape]], part: Sequence[tuple[str, Shape]], size: int) -> None:
        """Compares the draws for `size` samples with those for the share's part of them, to see where samples are."""
        if [operation for operation, _ in whole] != [operation for operation, _ in part]:
            return
        for (operation, all_rows), (_, rows) in zip(whole, part, strict=True):
            changed = [index for index, (a, b) in enumerate(zip(all_rows, rows, strict=False)) if a != b]
            if len(all_rows) != len(rows) or len(changed) > 1:
                continue
            index = changed[0] if changed else None
            if index is not None and (
                all_rows[index] % size or all_rows[index] // size != rows[index] / self.share.count
            ):
                continue
            each = 1 if index is None else all_rows[index] // size
            rest = rows if index is None else rows[:index] + rows[index + 1 :]
            layout, known = Layout(index, each, rest), self._layouts.setdefault((operation, len(rows)), [])
            if layout not in known:
                known.append(layout)
        self._found.clear()

    def draw(self, operation: str, shape: Sequence[int], device: torch.device, numbers: Numbers) -> Tensor:
        """numbers(key, first, count, device) for the shape, each sample's by its position."""
        shape = tuple(shape)
        layout, key, first = self.position(operation, shape)
        found = numbers(key, first, math.prod(shape), device)
        if not layout.dimension:
            return found.view(shape)
        return found.view(shape[layout.dimension], *layout.rest).movedim(0, layout.dimension)

    def position(self, operation: str, shape: Shape) -> tuple[Layout, int, int]:
        """Of the next call: its layout, its key, and the position of its first element."""
        wanted = operation, shape, self.share.count
        layout = self._found.get(wanted) or self._found.setdefault(wanted, self._layout(operation, shape))
        (key,) = torch.empty(1, dtype=torch.int64).random_().tolist()
        self.drawn.append((operation, shape))
        self.digest = zlib.crc32(repr(layout).encode(), self.digest)
        return layout, key, 0 if layout.dimension is None else self.share.first * layout.each * math.prod(layout.rest)

    def _layout(self, operation: str, shape: Shape) -> Layout:
        known, count = self._layouts.get((operation, len(shape)), []), self.share.count
        fitting = [layout for layout in known if layout.fits(shape, count)]
        if len(fitting) == 1:
            return fitting[0]
        # Of shapes that the probe has not seen: as in the operation's others, or else in the first dimension
        indices = {layout.dimension for layout in known}
        if fitting or len(indices) > 1:
            raise InputError(
                f"{operation} of shape {shape} may have the samples in more than one dimension, or in none: choose "
                "batch_size so that each rank has at least 2 samples, and give all samples the same shape"
            )
        index = indices.pop() if indices else 0
        if index is None or not shape or not count or shape[index] % count:
            return Layout(None, 1, shape)
        return Layout(index, shape[index] // count, shape[:index] + shape[index + 1 :])


_active: ByRow | None = None


def draws_so_far() -> int:
    """How many draws of the block have come here."""
    return len(_active.drawn) if _active else 0


def _dropout(rows: ByRow, features: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return features
    kernel = dropout_kernel() if features.is_cuda else None
    if kernel:
        layout, key, first = rows.position("dropout", tuple(features.shape))
        if layout.dimension == 0:
            return kernel.Dropout.apply(features, p, key, first)
    kept = functools.partial(random_numbers.kept, p=p)
    # One product of a scaled mask: with two factors, forward and backward take twice as long
    mask = rows.draw("dropout", features.shape, features.device, kept).to(features.dtype)
    return features * mask.mul_(random_numbers.threshold_of(p)[1])


def _dropout_in_place(rows: ByRow, features: Tensor, p: float, train: bool) -> Tensor:
    return features.copy_(_dropout(rows, features, p, train)) if train and p else features


def _attend(
    rows: ByRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """torch's fused kernels draw by themselves; its plain one calls dropout."""
    if not dropout_p:
        return ATTEND(query, key, value, mask, 0.0, *args, **kwargs)
    return plain_attention(query, key, value, mask, dropout_p, *args, **kwargs)


def _normalise(rows: ByRow, *args: Any) -> Tensor:
    rows.normalised |= args[5]
    return batch_norm(rows.share, *args)


def _normalise_instances(rows: ByRow, *args: Any) -> Tensor:
    """torch computes it by batch norm of one row, which is not the batch."""
    global _active
    _active = None
    try:
        return NORMALISE_INSTANCES(*args)
    finally:
        _active = rows


def _fill(numbers: Callable[..., Numbers]) -> Callable[..., Tensor]:
    """Of an operation that fills a tensor in place: numbers(dtype, its further arguments)."""

    def fill(rows: ByRow, filled: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        by_position = numbers(filled.dtype, *args, **kwargs)
        return filled.copy_(rows.draw("fill", filled.shape, filled.device, by_position))

    return fill


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Numbers:
    drawn = functools.partial(random_numbers.uniform, dtype=dtype)
    return lambda *position: drawn(*position).mul_(high - low).add_(low)


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Numbers:
    return lambda *position: random_numbers.normal(*position).mul_(std).add_(mean)


def _exponential(dtype: torch.dtype, rate: float = 1.0) -> Numbers:
    return lambda *position: random_numbers.uniform(*position).neg_().log1p_().div_(-rate)


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Numbers:
    return lambda *position: random_numbers.uniform(*position) < p


def _bernoulli_of(rows: ByRow, filled: Tensor, p: Tensor) -> Tensor:
    return filled.copy_(rows.draw("fill", filled.shape, filled.device, random_numbers.uniform) < p)


def _integers(dtype: Any, low: int, high: int) -> Numbers:
    return functools.partial(random_numbers.integers, low=low, high=high)


def _integers_of(rows: ByRow, low: int, high: int, size: Sequence[int], **like: Any) -> Tensor:
    return _fill(_integers)(rows, torch.empty(size, **{"dtype": torch.int64, **like}), low, high)


# What is replaced above autograd: torch's C++ calls these, too
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "dropout_": _dropout_in_place,
    "scaled_dot_product_attention": _attend,
    "batch_norm": _normalise,
    "instance_norm": _normalise_instances,
    "bernoulli_.float": _fill(_bernoulli),
    "bernoulli_.Tensor": _bernoulli_of,
    "bernoulli": lambda rows, p: _bernoulli_of(rows, torch.empty_like(p), p),
    "bernoulli.p": lambda rows, like, p: _fill(_bernoulli)(rows, torch.empty_like(like), p),
    "uniform_": _fill(_uniform),
    "normal_": _fill(_normal),
    "normal.Tensor_float": lambda rows, mean, std=1.0: mean + _fill(_normal)(rows, torch.empty_like(mean), 0.0, std),
    "normal.float_Tensor": lambda rows, mean, std: mean + std * _fill(_normal)(rows, torch.empty_like(std)),
    "normal.Tensor_Tensor": lambda rows, mean, std: mean + std * _fill(_normal)(rows, torch.empty_like(mean + std)),
    "exponential_": _fill(_exponential),
}
# What makes a tensor comes from Python below autograd; so it is replaced there, by an empty one and what fills it
FACTORIES: dict[str, Callable[..., Tensor]] = {
    "rand": lambda rows, size, **like: _fill(_uniform)(rows, torch.empty(size, **like)),
    "randn": lambda rows, size, **like: _fill(_normal)(rows, torch.empty(size, **like)),
    "normal.float_float": lambda rows, *args, **like: _fill(_normal)(rows, torch.empty(args[2], **like), *args[:2]),
    "randint": lambda rows, high, size, **like: _integers_of(rows, 0, high, size, **like),
    "randint.low": lambda rows, *args, **like: _integers_of(rows, *args, **like),
    "rand_like": lambda rows, one, **like: _fill(_uniform)(rows, torch.empty_like(one, **like)),
    "randn_like": lambda rows, one, **like: _fill(_normal)(rows, torch.empty_like(one, **like)),
    "randint_like": lambda rows, one, high, **like: _fill(_integers)(rows, torch.empty_like(one, **like), 0, high),
    "randint_like.low_dtype": lambda rows, one, *args, **like: _fill(_integers)(
        rows, torch.empty_like(one, **like), *args
    ),
}


@functools.cache
def dropout_kernel() -> Any:
    """The module of that name; None where there is no Triton to compile it."""
    if importlib.util.find_spec("triton") is None:
        return None
    from flyte_ddp.engine import dropout_kernel

    return dropout_kernel


@functools.cache
def _replace_operators() -> list[torch.library.Library]:
    """Once per process; what is returned keeps them replaced."""
    library = torch.library.Library("aten", "IMPL")
    for replacements, keys in (OPERATORS, ("AutogradCPU", "AutogradCUDA")), (FACTORIES, ("CPU", "CUDA")):
        for name, ours in replacements.items():
            for key in keys:
                library.impl(name, _switch(name, ours), key)
    return [library]


def _switch(name: str, ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Calls ours in a block, unless the user gives a generator of their own, else torch's."""
    packet, _, overload = name.partition(".")
    theirs = original(getattr(getattr(torch.ops.aten, packet), overload or "default"))

    def call(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        if _active and generator is None:
            return ours(_active, *args, **kwargs)
        return theirs(*args, **kwargs, **({} if generator is None else {"generator": generator}))

    return call
