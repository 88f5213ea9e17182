"""torch's operators that draw or normalise, and what they do by sample instead; see mode.py.

They are replaced by torch's own torch.library, rather than layers or functions of Python: so subclasses, functional
calls, other libraries and torch's own C++ all come here. Outside of a block they do what they always did. What draws in
another way is found by the probe, which refuses it.
"""

import functools
import importlib.util
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flyte_ddp import random_numbers
from flyte_ddp.engine.global_batch.batch_norm import batch_norm, is_plain
from flyte_ddp.engine.global_batch.ghost_batch_norm import ghost_batch_norm
from flyte_ddp.engine.global_batch.positions import Numbers, Positions, leave_compiled
from flyte_ddp.engine.torch_compat import check, original, plain_attention
from flyte_ddp.engine.tracing_compat import leave_uncompiled

ATTEND = original(torch.ops.aten.scaled_dot_product_attention.default)
NORMALISE_INSTANCES = original(torch.ops.aten.instance_norm.default)

_active: Positions | None = None


@contextmanager
def replaced_by(mode: Positions | None) -> Iterator[None]:
    """While the block runs, torch's operators are those of `mode`; of None, torch's own."""
    global _active
    _replace_operators()
    outer, _active = _active, mode
    try:
        yield
    finally:
        _active = outer


def active() -> Positions | None:
    """Of the block that runs."""
    return _active


def draws_so_far() -> int:
    """How many draws of the block, or of what is compiled in it, have come here."""
    return len(_active.trace.draws if _active.trace else _active.drawn) if _active else 0


def _dropout(mode: Positions, features: Tensor, p: float, train: bool) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be at least 0 and at most 1, got {p}")
    if not train or p == 0:
        return features
    position = mode.position("dropout", tuple(features.shape))
    has_kernel = features.is_cuda and position.layout.dimension == 0 and isinstance(position.key, int)  # not compiled
    kernel = dropout_kernel() if has_kernel else None
    if kernel and features.dtype in kernel.DTYPES:
        return kernel.Dropout.apply(features, p, position.key, position.first)
    kept = functools.partial(random_numbers.kept, p=p)
    # One product of a scaled mask: with two factors, forward and backward take twice as long
    mask = position.draw(tuple(features.shape), features.device, kept).to(features.dtype)
    return features * mask.mul_(random_numbers.threshold_of(p)[1])


def _dropout_in_place(mode: Positions, features: Tensor, p: float, train: bool) -> Tensor:
    return features.copy_(_dropout(mode, features, p, train)) if train and p else features


def _attend(
    mode: Positions,
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
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:  # the plain one would add it, as 0 and 1
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    return plain_attention(query, key, value, mask, dropout_p, *args, **kwargs)


def _normalise(mode: Positions, *args: Any) -> Tensor:
    training = args[5]
    share = mode.share
    if training and (share.alone or share.ghost_batch_size or not is_plain(share, args[0])):
        leave_compiled()
    mode.normalised |= training
    if training and share.ghost_batch_size:
        return ghost_batch_norm(share, mode.running, *args)
    return batch_norm(share, mode.waiting, *args)


def _normalise_instances(mode: Positions, *args: Any) -> Tensor:
    """torch computes it by batch norm of one row, which is not the batch."""
    with replaced_by(None):
        normalised: Tensor = NORMALISE_INSTANCES(*args)
    return normalised


def _fill(name: str, numbers: Callable[..., Numbers]) -> Callable[..., Tensor]:
    """Of torch's operation of that name, which fills a tensor in place: numbers(dtype, its further arguments)."""
    packet, _, overload = name.partition(".")
    operation = original(getattr(getattr(torch.ops.aten, packet), overload or "default"))

    def fill(mode: Positions, filled: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        operation(filled.new_empty(0), *args, **kwargs)  # refuses wrong arguments
        by_position = numbers(filled.dtype, *args, **kwargs)
        drawn = torch.view_as_real(filled) if filled.is_complex() else filled
        drawn.copy_(mode.draw("fill", drawn.shape, drawn.device, by_position))
        return filled

    return fill


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Numbers:
    drawn = functools.partial(random_numbers.uniform, dtype=dtype.to_real())
    return lambda *position: drawn(*position).mul_(high - low).add_(low)


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Numbers:
    std = std / math.sqrt(2) if dtype.is_complex else std  # each part has half of the variance
    return lambda *position: random_numbers.normal(*position).mul_(std).add_(mean)


def _exponential(dtype: torch.dtype, rate: float = 1.0) -> Numbers:
    # never 0, as torch's: who takes logarithms, such as Gumbel softmax, relies on it
    return lambda *position: random_numbers.uniform(*position).clamp_(min=2.0**-24).neg_().log1p_().div_(-rate)


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Numbers:
    return lambda *position: random_numbers.uniform(*position) < p


def _integers(dtype: Any, low: int, high: int) -> Numbers:
    return functools.partial(random_numbers.integers, low=low, high=high)


UNIFORM, NORMAL = _fill("uniform_", _uniform), _fill("normal_", _normal)
BERNOULLI, INTEGERS = _fill("bernoulli_.float", _bernoulli), _fill("random_.from", _integers)


def _bernoulli_of(mode: Positions, filled: Tensor, p: Tensor) -> Tensor:
    check(p.clamp(0, 1) == p, "bernoulli: each p must be at least 0 and at most 1")
    return filled.copy_(mode.draw("fill", filled.shape, filled.device, random_numbers.uniform) < p)


def _normal_of(mode: Positions, mean: Any, std: Any = 1.0) -> Tensor:
    """As torch's, it has no gradients for its mean and standard deviation."""
    with torch.no_grad():
        if isinstance(std, Tensor):
            check(std >= 0, "normal: each std must be at least 0")
            return mean + std * NORMAL(mode, torch.empty_like(mean + std))
        return mean + NORMAL(mode, torch.empty_like(mean), 0.0, std)


def _integers_of(mode: Positions, low: int, high: int, size: Sequence[int], **like: Any) -> Tensor:
    return INTEGERS(mode, torch.empty(size, **{"dtype": torch.int64, **like}), low, high)


# What is replaced above autograd: torch's C++ calls these, too
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "dropout_": _dropout_in_place,
    "scaled_dot_product_attention": _attend,
    "batch_norm": _normalise,
    "instance_norm": _normalise_instances,
    "bernoulli_.float": BERNOULLI,
    "bernoulli_.Tensor": _bernoulli_of,
    "bernoulli": lambda mode, p: _bernoulli_of(mode, torch.empty_like(p), p),
    "bernoulli.p": lambda mode, like, p: BERNOULLI(mode, torch.empty_like(like), p),
    "uniform_": UNIFORM,
    "normal_": NORMAL,
    "normal.Tensor_float": _normal_of,
    "normal.float_Tensor": _normal_of,
    "normal.Tensor_Tensor": _normal_of,
    "exponential_": _fill("exponential_", _exponential),
}
# What makes a tensor comes from Python below autograd; so it is replaced there, by an empty one and what fills it
FACTORIES: dict[str, Callable[..., Tensor]] = {
    "rand": lambda mode, size, **like: UNIFORM(mode, torch.empty(size, **like)),
    "randn": lambda mode, size, **like: NORMAL(mode, torch.empty(size, **like)),
    "normal.float_float": lambda mode, *args, **like: NORMAL(mode, torch.empty(args[2], **like), *args[:2]),
    "randint": lambda mode, high, size, **like: _integers_of(mode, 0, high, size, **like),
    "randint.low": lambda mode, *args, **like: _integers_of(mode, *args, **like),
    "rand_like": lambda mode, one, **like: UNIFORM(mode, torch.empty_like(one, **like)),
    "randn_like": lambda mode, one, **like: NORMAL(mode, torch.empty_like(one, **like)),
    "randint_like": lambda mode, one, high, **like: INTEGERS(mode, torch.empty_like(one, **like), 0, high),
    "randint_like.low_dtype": lambda mode, one, *args, **like: INTEGERS(mode, torch.empty_like(one, **like), *args),
}


def has_triton() -> bool:
    """Whether Triton is installed, and has the C compiler that it needs, which slim images leave out."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return importlib.util.find_spec("triton") is not None and compiler is not None


@functools.cache
def dropout_kernel() -> Any:
    """The module of that name; None where it cannot be compiled: then torch's operations draw the same numbers."""
    if not has_triton():
        return None
    try:
        from flyte_ddp.engine.global_batch import dropout_kernel

        dropout_kernel.compile_now()
    except Exception as error:  # of many types: a compiler that fails, or lacks Python's headers
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(f"dropout is drawn without Triton, which takes longer, since that fails ({reason})", stacklevel=1)
        return None
    return dropout_kernel


@functools.cache
def _replace_operators() -> list[torch.library.Library]:
    """Once per process; what is returned keeps them replaced."""
    leave_uncompiled(_call)
    library = torch.library.Library("aten", "IMPL")
    for replacements, keys in (OPERATORS, ("AutogradCPU", "AutogradCUDA")), (FACTORIES, ("CPU", "CUDA")):
        for name, replacement in replacements.items():
            packet, _, overload = name.partition(".")
            operation = original(getattr(getattr(torch.ops.aten, packet), overload or "default"))
            for key in keys:
                library.impl(name, functools.partial(_call, replacement, operation), key)
    return [library]


def _call(
    replacement: Callable[..., Tensor],
    operation: Callable[..., Tensor],
    /,
    *args: Any,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Tensor:
    """Calls the replacement in a block, unless the user gives a generator of their own, else torch's."""
    if _active and generator is None:
        return replacement(_active, *args, **kwargs)
    return operation(*args, **kwargs, **({} if generator is None else {"generator": generator}))
