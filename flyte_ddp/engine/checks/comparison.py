"""Compares what a recipe computes for a batch with what it computes again, or in parts."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine.checks.draws import DRAWN
from flyte_ddp.engine.checks.trials import Trial, Trials
from flyte_ddp.engine.measures import code_location, finite_number
from flyte_ddp.engine.sharding.sharding import on_shards
from flyte_ddp.engine.torch_compat import may_round_to_tf32, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

# Of a number and of those around it, or of what the coarsest type in use rounds by: for other numbers of rows libraries
# choose other kernels, which add in another order
TOLERANCE, ROUNDINGS = 1e-3, 8
SIZES = 1 << 16  # how many numbers of a tensor are looked at for their size


def refuse_unsteady(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Raise InputError if a method returns something else for the same samples and random numbers: a training that
    is resumed would go on with other bits."""
    again = trials()
    for stage in whole.stages:
        if _gaps(stage, whole, [again], tolerance_of(trials.model)) is not None:
            raise InputError(
                f"{code_location(recipe, stage)}: returns something else each time, so that no training could be "
                f"resumed: let {DRAWN}; count in a buffer"
            )


def refuse_coupled_predictions(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Raise InputError if the predictions of a sample depend on the others of its batch."""
    if whole.stages["predictions"] is None or whole.draws:
        return
    parts = [trials(first, last) for first, last in trials.parts]
    gaps = _gaps("predictions", whole, parts, tolerance_of(trials.model))
    if gaps:
        raise InputError(
            f"{code_location(recipe, 'predictions')}: {gaps} of a sample depends on the others of its batch: to "
            "compare samples, call all_gather(); to normalise, use nn.BatchNorm, nn.GroupNorm or nn.LayerNorm"
        )


def tolerance_of(model: nn.Module) -> float:
    """By what part of their size numbers may differ that should be the same."""
    steps = [torch.finfo(weight.dtype).eps for weight in model.parameters() if weight.is_floating_point()]
    if may_round_to_tf32() and any(weight.is_cuda for weight in model.parameters()):
        steps.append(2.0**-10)
    return max([TOLERANCE, *(ROUNDINGS * step for step in steps)])


@torch.no_grad()  # with gradients, torch may refuse a view of a weight that has changed since
def _gaps(stage: str, whole: Trial, parts: Sequence[Trial], tolerance: float) -> str | None:
    """The name of what differs between the whole and the joined parts; None if nothing does or can be compared, such
    as rows that are padded to the longest of their part."""
    leaves = pytree.tree_flatten_with_path(whole.stages[stage])[0]
    others = [pytree.tree_leaves(part.stages[stage]) for part in parts]
    if any(len(part) != len(leaves) for part in others):
        return None
    for (path, leaf), *pieces in zip(leaves, *others, strict=True):
        if not all(isinstance(one, Tensor) and one.ndim and one.shape[1:] == leaf.shape[1:] for one in (leaf, *pieces)):
            continue
        if any(len(one) * whole.count != len(leaf) * part.count for one, part in zip(pieces, parts, strict=True)):
            continue  # not as many rows for each sample
        joined = torch.cat(pieces)
        if not is_close(leaf, joined, tolerance):
            first = path[0] if path else None
            name = repr(first.key) if isinstance(first, pytree.MappingKey) else "what it gives"
            return f"{name} (by {(leaf.double() - joined.double()).abs().max().item():.2g})"
    return None


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether each number differs by little, compared with itself or with most others: one near 0 may be the difference
    of two that are not."""
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = max(tolerance, ROUNDINGS * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other.to(one.dtype), tolerance, tolerance * _size_of(one), equal_nan=True)


def _size_of(numbers: Tensor) -> float:
    """The lower quartile of the sizes of those that are neither 0 nor infinite: a few may stand for a mask."""
    sizes = numbers.detach().abs().flatten()
    sizes = sizes[:: max(1, len(sizes) // SIZES)].double()
    sizes = sizes[sizes.isfinite() & (sizes > 0)].sort().values
    return sizes[len(sizes) // 4].item() if len(sizes) else 0.0


# --- the optimizer ---


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer; InputError if it returns anything else."""
    optimizer = recipe.optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"{code_location(recipe, 'optimizer')} must return one optimizer of torch.optim, got "
            f"{type(optimizer).__name__}: "
            "parameters that are to be treated differently are groups of one optimizer"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InputError(
            f"{code_location(recipe, 'optimizer')} must return an optimizer without a scheduler of torch, got one: "
            "nothing calls its step(), so that rates stay as it begins, which may be 0; let lr_lambda(step, steps) "
            "return what multiplies the rate"
        )
    return on_shards(optimizer)


def refuse_scaled_rates(recipe: Recipe, model: nn.Module, steps: int) -> None:
    """Raise InputError if another number of ranks has optimizer() or lr_lambda() return something else; steps: of the
    whole training."""
    results = []
    for rank, world_size in ((0, 1), (1, 2)):
        with among_ranks(rank, world_size):
            groups = _plain_groups(optimizer_of(recipe, model))
            results.append({"optimizer": groups, "lr_lambda": some_rates(recipe, steps)})
    one, two = results
    for method in one:
        if one[method] != two[method]:
            raise InputError(
                f"{code_location(recipe, method)}: with virtual_ranks what it returns must not depend on the rank or "
                "the number of ranks: read neither, since batch_size is that of all ranks together"
            )


def some_rates(recipe: Recipe, steps: int) -> list[float]:
    """What lr_lambda() returns for a few of the steps; InputError if that is no finite number."""
    return [finite_number(recipe, "lr_lambda", step, steps) for step in sorted({0, 1, steps // 2, steps - 1})]


def _plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of the parameter groups, as far as they can be compared."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str, tuple, Tensor))
        }
        for group in optimizer.param_groups
    ]


@contextmanager
def among_ranks(rank: int, size: int) -> Iterator[None]:
    """While the block runs, torch.distributed and torchrun's variables say that this is that rank of so many."""
    groups: Any = distributed.group  # the type checker would insist on a group's own class
    group = groups.WORLD
    before = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    now = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        groups.WORLD = _Group(group, rank, size)
        os.environ.update({name: now[name] for name in before})
        yield
    finally:
        groups.WORLD = group
        os.environ.update(before)


class _Group:
    """The ranks' process group, but of another rank and size; whatever is exchanged goes through the real one."""

    def __init__(self, group: Any, rank: int, size: int):
        self._group, self.rank, self.size = group, lambda: rank, lambda: size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
