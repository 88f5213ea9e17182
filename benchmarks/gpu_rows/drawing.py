"""Cases on random numbers: a GPU draws what it should, by the kernel and by torch's operations alike."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_rows.row import Missing, expect
from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch import operators
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.engine.network import compiled_draws
from flyte_ddp.engine.network.compiled_draws import compile_by_position

SIZE, HALF = 16, 8  # samples of a global batch, and of the second of two ranks
DRAWS: dict[str, Callable[..., Tensor]] = {
    "words": lambda *position: random_numbers.words(*position),  # looked up when it is called
    "uniform": random_numbers.uniform,
    "normal": random_numbers.normal,
    "integers": partial(random_numbers.integers, low=-3, high=10),
    "kept": partial(random_numbers.kept, p=0.3),
}


def numbers(device: torch.device) -> str:
    """The streams of a GPU are those that torch's operations give on a CPU."""
    for name, draw in DRAWS.items():
        for first, count in ((0, 9), (7, 1000), ((1 << 40) + 5, 30)):
            found = draw(5, first, count, device).cpu()
            with patch.object(random_numbers, "words", random_numbers.split_mix):
                expected = draw(5, first, count, torch.device("cpu"))
            if device.type == "cpu":
                expected = draw(5, first, count, device)
            same = torch.allclose(found, expected, atol=1e-5) if name == "normal" else torch.equal(found, expected)
            expect(same, f"{name}: other numbers")
    return f"{', '.join(DRAWS)}: as computed on a CPU"


def dropouts(device: torch.device) -> str:
    """With the kernel and without, forward and backward, wherever the samples are, in all types."""
    if device.type != "cuda":
        raise Missing("no GPU")
    kernel = operators.dropout_kernel()
    if kernel is None:
        raise Missing("Triton is not installed, or cannot compile here")
    kinds = torch.float32, torch.bfloat16, torch.float16, torch.float64
    for dtype in kinds:
        for dimension in (0, 1):
            shape = (HALF, 37, 11) if dimension == 0 else (37, HALF, 11)
            features = torch.randn(shape, device=device, dtype=dtype)
            features.view(-1)[::17] = torch.inf
            with_it, without = (_dropped(features, dimension, one) for one in (kernel, None))
            for one, other in zip(with_it, without, strict=True):
                expect(_same_bits(one, other), f"{dtype}, samples in dimension {dimension}: other numbers")
    return "the same bits with Triton and without, forward and backward, in 4 types"


def _dropped(features: Tensor, dimension: int, kernel: object) -> tuple[Tensor, ...]:
    mode, shape = GlobalBatchMode(BatchShare(HALF, HALF, SIZE)), tuple(features.shape)
    whole = tuple(SIZE if number == dimension else length for number, length in enumerate(shape))
    mode.learn([("dropout", whole)], [("dropout", shape)], SIZE)
    given = features.clone().requires_grad_()
    with patch.object(operators, "dropout_kernel", lambda: kernel), mode.block(1):
        found = F.dropout(given, 0.3), F.dropout(given, 0.7)  # the second, too: a draw must take one key
    sum(one.nan_to_num(posinf=0.0).sum() for one in found).backward()  # type: ignore[union-attr]
    return *found, given.grad  # type: ignore[return-value]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    both_nan = one.isnan() & other.isnan()
    return bool(((one == other) | both_nan).all())


def by_position(device: torch.device) -> str:
    """Whatever torch draws in a block is that of the global batch: the second half is what the whole has there."""
    draws = _draws_on(device)
    for name, draw in draws.items():
        whole, half = (GlobalBatchMode(BatchShare(first, SIZE - first, SIZE)) for first in (0, HALF))
        with whole.block(1):
            everything = draw(SIZE)
        half.learn(whole.drawn, [(operation, (HALF, *shape[1:])) for operation, shape in whole.drawn], SIZE)
        with half.block(1):
            found = draw(HALF)
        expect(torch.allclose(found, everything[HALF:], atol=1e-5), f"{name}: other numbers on the second rank")
    return f"{len(draws)} operations and layers"


def compiled(device: torch.device) -> str:
    """What torch compiles draws what it would draw otherwise, for other seeds and samples than it was compiled for."""
    draws, mode = _draws_on(device), GlobalBatchMode(BatchShare(0, HALF, SIZE))

    mode.is_compiled = True

    def together(count: int) -> list[Tensor]:
        return [draw(count) for draw in draws.values()]

    together_compiled = torch.compile(together, backend=compile_by_position)
    compiler = compiled_draws.COMPILER if device.type == "cuda" else "aot_eager"  # a compiler of C++ takes minutes
    with patch.object(compiled_draws, "COMPILER", compiler):
        for first, seed in ((0, 1), (HALF, 2)):
            mode.share.first = first
            with mode.block(seed):
                expected = together(HALF)
            with mode.block(seed):
                found = together_compiled(HALF)
            for name, one, other in zip(draws, found, expected, strict=True):
                expect(torch.allclose(one, other, atol=1e-5), f"{name}: other numbers, compiled")
    return f"{len(draws)} operations and layers, by {compiler}"


def _draws_on(device: torch.device) -> dict[str, Callable[[int], Tensor]]:
    """For a number of samples."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).to(device)
    return {
        "rand": lambda n: torch.rand(n, 5, device=device),
        "randn": lambda n: torch.randn(n, 5, device=device),
        "randint": lambda n: torch.randint(9, (n, 5), device=device),
        "randn_like": lambda n: torch.randn_like(torch.zeros(n, 5, device=device)),
        "bernoulli": lambda n: torch.bernoulli(torch.full((n, 5), 0.3, device=device)),
        "normal": lambda n: torch.normal(torch.zeros(n, 5, device=device), torch.ones(n, 5, device=device)),
        "exponential_": lambda n: torch.empty(n, 5, device=device).exponential_(),
        "dropout": lambda n: F.dropout(torch.ones(n, 5, device=device), 0.5),
        "a transformer's layer": lambda n: layer(torch.ones(n, 6, 8, device=device)),
    }
