"""docs/determinism.md has every sum over ranks with a test, and remedies that give the same numbers."""

import ast
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.commands import ROOT

REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"}
LIBRARY = ROOT / "flyte_ddp"


def functions_that_reduce() -> Iterator[str]:
    """Yield the file and function of each reduction over ranks in the library."""
    for path in sorted(LIBRARY.rglob("*.py")):
        tree = ast.parse(path.read_text())
        yield from (f"{path.relative_to(LIBRARY)}: {name}" for name in _reducing(tree, ""))


def _reducing(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}".lstrip(".") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in REDUCTIONS:
            yield inner
        yield from _reducing(child, inner)


def registered() -> dict[str, str]:
    """Return the test of each sum in the page's table, by file and function."""
    page = (ROOT / "docs" / "determinism.md").read_text()
    rows = re.findall(r"^\| (`[^|]*\.py: [^|]*`) \| [^|]* \| `(tests/[^|]*)` \|$", page, re.MULTILINE)
    sums = {}
    for functions, test in rows:
        file = ""
        for one in re.findall("`(.*?)`", functions):
            file = one.partition(": ")[0] if ": " in one else file
            path = file if (LIBRARY / file).exists() else f"engine/{file}"
            sums[f"{path}: {one.rpartition(': ')[2]}"] = test
    return sums


def test_each_sum_over_ranks_has_a_test_that_repeats_it():
    sums = registered()
    assert set(functions_that_reduce()) == set(sums)
    for test in sums.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_there_are_no_kernels_of_our_own():
    kernels = r"^\s*(import|from) (triton|numba)|cpp_extension|load_inline|custom_op"
    assert not [path for path in LIBRARY.rglob("*.py") if re.search(kernels, path.read_text(), re.MULTILINE)]


def _bilinear(x: Tensor) -> Tensor:
    height, width = (F.interpolate(torch.eye(size)[None], scale_factor=2, mode="linear")[0].T for size in x.shape[2:])
    return height @ x @ width.T


def _reflected(x: Tensor) -> Tensor:
    return torch.cat([x[..., 1:3].flip(-1), x, x[..., -3:-1].flip(-1)], -1)


def _by_rows(x: Tensor) -> Tensor:
    return F.cross_entropy(x.movedim(1, -1).flatten(0, -2), LABELS.flatten())


LABELS = torch.arange(2 * 8 * 6).view(2, 8, 6) % 4
ROWS = torch.tensor([[1, 2, 3], [4, 4, 0]])
NUMBERS = torch.tensor([0, 2, 2, 3])


@pytest.mark.parametrize(
    ("operation", "remedy"),
    [
        (nn.AdaptiveAvgPool2d(1), lambda x: x.mean((2, 3), keepdim=True)),
        (nn.AdaptiveAvgPool2d((4, 3)), nn.AvgPool2d(2)),
        (nn.AdaptiveMaxPool2d(1), lambda x: x.amax((2, 3), keepdim=True)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), _bilinear),
        (lambda x: F.pad(x, (2, 2, 0, 0), "reflect"), _reflected),
        (lambda x: F.cross_entropy(x, LABELS), _by_rows),
        (lambda x: F.embedding_bag(ROWS, x[0, 0], mode="max"), lambda x: F.embedding(ROWS, x[0, 0]).amax(1)),
        (
            lambda x: torch.bincount(NUMBERS, x[0, 0, 0, :4], 5),
            lambda x: torch.zeros(5).scatter_add(0, NUMBERS, x[0, 0, 0, :4]),
        ),
        (lambda x: torch.median(x, -1).values, lambda x: torch.sort(x, -1).values[..., (x.shape[-1] - 1) // 2]),
    ],
)
def test_a_remedy_gives_the_same_numbers(operation: Callable[[Tensor], Tensor], remedy: Callable[[Tensor], Tensor]):
    x = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(remedy(x), operation(x))
