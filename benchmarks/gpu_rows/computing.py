"""Cases on arithmetic: random numbers, TF32, reproducible bits, and what the probe takes for the same."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_rows.row import Missing, expect
from flyte_ddp import random_numbers
from flyte_ddp.batch_share import GatherRows
from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.engine.batches.batches import EvaluationBatches
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.engine.checks.trials import choose_tolerance, is_close
from flyte_ddp.engine.evaluations import gather_rows
from flyte_ddp.engine.hosts.places import collect_facts, get_uuid, measure_memory, multiply_matrices
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.nvml import why_slow
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipes.models import build_model

DRAWS: dict[str, Callable[..., Tensor]] = {
    "words": lambda *position: random_numbers.words(*position),  # looked up when it is called
    "uniform": random_numbers.uniform,
    "normal": random_numbers.normal,
    "integers": partial(random_numbers.integers, low=-3, high=10),
}


def numbers(device: torch.device) -> str:
    """Compare the streams of a GPU with those that torch's operations give on a CPU."""
    if device.type != "cuda":
        raise Missing("no GPU")
    for name, draw in DRAWS.items():
        for first, count in ((0, 9), (7, 1000), ((1 << 40) + 5, 30)):
            found = draw(5, first, count, device).cpu()
            with patch.object(random_numbers, "words", random_numbers.split_mix):
                expected = draw(5, first, count, torch.device("cpu"))
            same = torch.allclose(found, expected, atol=1e-5) if name == "normal" else torch.equal(found, expected)
            expect(same, f"{name}: other numbers")
    return f"{', '.join(DRAWS)}: as computed on a CPU"


def _error(found: Any, exact: Any) -> float:
    exact = exact.detach()
    return float((found.detach().cpu().double() - exact).norm() / exact.norm().clamp(min=1e-12))


def ieee(device: torch.device) -> str:
    """Products and convolutions in IEEE float32, as settle_arithmetic leaves it."""
    errors = [
        _error(product(*given), product(*(one.cpu().double() for one in given))) for product, given in _products(device)
    ]
    expect(max(errors) < 1e-5, f"errors of {errors}")
    return f"errors {', '.join(f'{error:.1e}' for error in errors)}"


def _products(device: torch.device) -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    torch.manual_seed(0)
    square = [torch.randn(512, 512, device=device) for _ in range(2)]
    images = [torch.randn(16, 32, 16, 16, device=device), torch.randn(32, 32, 3, 3, device=device)]
    return [(torch.matmul, square), (F.conv2d, images)]


def deterministic(device: torch.device) -> str:
    """Operations that add in any order by default, twice each: the same bits, and no warning."""
    torch.manual_seed(0)
    index = torch.randint(50, (20_000,), device=device)
    source = torch.randn(20_000, 16, device=device)
    table = nn.Embedding(50, 16).to(device)
    network = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 10)).to(device)
    images = torch.randn(32, 3, 32, 32, device=device)
    zeros = torch.zeros(50, 16, device=device)

    def gradients(model: nn.Module, given: Tensor) -> Tensor:
        found = torch.autograd.grad((model(given) * 1.1).square().sum(), [*model.parameters()])
        return torch.cat([one.flatten() for one in found])

    cases: dict[str, Callable[[], Tensor]] = {
        "index_add": lambda: zeros.index_add(0, index, source),
        "scatter_add": lambda: zeros.scatter_add(0, index[:, None].expand(-1, 16), source),
        "index_put": lambda: zeros.index_put((index,), source, accumulate=True),
        "an embedding's gradient": lambda: gradients(table, index),
        "a network's gradients": lambda: gradients(network, images),
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, case in cases.items():
            first = case()
            expect(all(torch.equal(case(), first) for _ in range(4)), f"{name}: other bits")
    warned = [str(one.message) for one in said if "determinis" in str(one.message)]
    expect(not warned, "; ".join(warned))
    expect(bool(os.environ.get("CUBLAS_WORKSPACE_CONFIG")), "CUBLAS_WORKSPACE_CONFIG is not set")
    return f"{', '.join(cases)}: the same bits five times"


def close_enough(device: torch.device) -> str:
    """What libraries compute for 8, 5 and 3 rows differs by rounding, which the probe must not take for coupling."""
    told = []
    for is_tf32 in (False, True):
        if is_tf32 and device.type != "cuda":
            continue
        with _tf32(is_tf32):
            for name, network, given in _networks(device):
                with torch.no_grad():
                    whole, parts = network(given), torch.cat([network(given[:3]), network(given[3:])])
                tolerance = choose_tolerance(network)
                gap = ((whole - parts).abs().max() / whole.abs().mean()).item()
                told.append(f"{name} {gap:.1e} of {tolerance:.0e}{' in TF32' if is_tf32 else ''}")
                expect(is_close(whole, parts, tolerance), told[-1])
                expect(
                    not is_close(whole, 1.05 * whole, tolerance), f"{name}: what differs by 5 % is taken for rounding"
                )
    return ", ".join(told)


def _networks(device: torch.device) -> Iterator[tuple[str, nn.Module, Tensor]]:
    torch.manual_seed(0)
    yield (
        "resnet9",
        build_model("resnet9", 1, (3, 32, 32), 10).eval().to(device),
        torch.randn(8, 3, 32, 32, device=device),
    )
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 12)
    yield "12 transformer layers", encoder.eval().to(device), torch.randn(8, 50, 64, device=device)
    linear = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)))
    yield "20 products", linear.to(device), torch.randn(8, 256, device=device)


@contextmanager
def _tf32(is_on: bool) -> Iterator[None]:
    flags: Any = torch.backends.cuda.matmul, torch.backends.cudnn
    for one in flags:
        one.allow_tf32 = is_on
    try:
        yield
    finally:
        for one in flags:
            one.allow_tf32 = False


def exchanged(device: torch.device) -> str:
    """all_gather() and the predictions of a split, in types that backends cannot send as they are."""
    kinds = torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32
    for kind in kinds:
        rows = torch.arange(30, device=device).view(10, 3).to(kind)
        expect(torch.equal(GatherRows.apply(rows, 10), rows), f"{kind}: all_gather() changes the rows")
        test = EvaluationBatches(Resident(torch.arange(10), device), 4, 0, 1, mixed=True)
        found, mine = torch.zeros(10, 3, dtype=kind), torch.cat([rows[batch.tree] for batch in test]).cpu()
        for samples, values in gather_rows(mine, test, device):
            found[samples] = values
        expect(torch.equal(found, rows.cpu()), f"{kind}: other predictions")
    return f"{len(kinds)} types"


def compared(device: torch.device) -> str:
    """The GPU's serial number, the driver's version, and how fast it is."""
    facts, (speed, product), (_, again) = collect_facts(device), multiply_matrices(device), multiply_matrices(device)
    expect(product == again, "a product of matrices has other bits the second time")
    expect(
        {"GPU", "GPU memory", "NVIDIA driver"} <= facts.keys() or device.type == "cpu", f"only {', '.join(facts)} known"
    )
    expect(speed > 1 or device.type == "cpu", f"{speed:.3g} TFLOPS")
    slow = why_slow(f"GPU-{get_uuid(device)}") or "nothing"
    uuid = get_uuid(device) or "no serial number"
    return f"{uuid}, {speed:.0f} TFLOPS, slowed down by {slow}, {facts}, {measure_memory(device)}"


def run(environment: Environment, link: Link, name: str) -> tuple[bool, str]:
    """Whether the machine has what the case needs, and what the case has found, or what is missing."""
    settle_arithmetic()
    with process_group(environment, 120) as device:
        try:
            found = globals()[name](device)
        except Missing as missing:
            return False, str(missing)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return True, found
