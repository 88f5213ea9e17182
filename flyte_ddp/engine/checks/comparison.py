"""Comparisons: a recipe's results for a batch with those of its parts, or of another time, or among other ranks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine.checks.trials import Trial, Trials
from flyte_ddp.engine.measures import code_location, finite_number
from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.engine.sharding.sharding import on_shards
from flyte_ddp.engine.torch_compat import may_round_to_tf32, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

# The tolerance is relative, and at least eight roundings of the coarsest dtype. It can't be zero: for other numbers of
# rows libraries choose other kernels, which add in another order.
TOLERANCE, ROUNDINGS = 1e-3, 8
SIZES = 1 << 16  # how many numbers of a tensor are looked at for their size


def refuse_unsteady(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Refuse a method that returns something else when the same samples are tried again.

    A training that is resumed would go on with other bits: no checkpoint has what such a method goes by.

    Raises:
        InputError: One of them does. It names the first.
    """
    again = trials()
    for stage in whole.stages:
        if _differ(stage, whole, [again], tolerance_of(trials.model)):
            raise InputError(
                f"{code_location(recipe, stage)}: returns something else each time, so that no training could be "
                "resumed: draw from torch.rand, numpy.random or random, whose generators each step seeds, and count "
                "in a buffer"
            )


def refuse_coupled_predictions(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Refuse predictions of a sample that depend on the others of its batch: they would depend on test_batch_size.

    Nothing is refused where evaluation draws random numbers, which are others for other samples.
    """
    if whole.stages["predictions"] is None or whole.has_drawn or trials.size == 1:
        return
    # Of two halves, both might have the mean of the whole
    cut = max(1, 3 * trials.size // 8)
    if _differ("predictions", whole, [trials(0, cut), trials(cut, trials.size)], tolerance_of(trials.model)):
        raise InputError(
            f"{code_location(recipe, 'predictions')}: those of a sample depend on the others of its batch: to compare "
            "samples, call all_gather(); to normalise, use nn.BatchNorm, nn.GroupNorm or nn.LayerNorm"
        )


def tolerance_of(model: nn.Module) -> float:
    """Return by what part of their size numbers may differ that should be the same."""
    steps = [torch.finfo(weight.dtype).eps for weight in model.parameters() if weight.is_floating_point()]
    if may_round_to_tf32() and any(weight.is_cuda for weight in model.parameters()):
        steps.append(2.0**-10)
    return max([TOLERANCE, *(ROUNDINGS * step for step in steps)])


@torch.no_grad()  # with gradients, torch may refuse a view of a weight that has changed since
def _differ(stage: str, whole: Trial, parts: Sequence[Trial], tolerance: float) -> bool:
    """Return whether a stage of the whole differs from that of the joined parts.

    What can't be compared doesn't count, such as rows that are padded to the longest of their part.
    """
    leaves = pytree.tree_leaves(whole.stages[stage])
    others = [pytree.tree_leaves(part.stages[stage]) for part in parts]
    if any(len(part) != len(leaves) for part in others):
        return False
    for leaf, *pieces in zip(leaves, *others, strict=True):
        if not all(isinstance(one, Tensor) and one.ndim and one.shape[1:] == leaf.shape[1:] for one in (leaf, *pieces)):
            continue
        if any(len(one) * whole.count != len(leaf) * part.count for one, part in zip(pieces, parts, strict=True)):
            continue  # not as many rows for each sample
        if not is_close(leaf, torch.cat(pieces), tolerance):
            return True
    return False


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether each number differs by little, compared with itself or with most others.

    A number near 0 may be the difference of two that are not, so it is compared with the others.
    """
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = max(tolerance, ROUNDINGS * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other.to(one.dtype), tolerance, tolerance * _size_of(one), equal_nan=True)


def _size_of(numbers: Tensor) -> float:
    """Return the lower quartile of the sizes, without 0 and infinity, since a few may stand for a mask."""
    sizes = numbers.detach().abs().flatten()
    sizes = sizes[:: max(1, len(sizes) // SIZES)].double()
    sizes = sizes[sizes.isfinite() & (sizes > 0)].sort().values
    return sizes[len(sizes) // 4].item() if len(sizes) else 0.0


# --- the optimizer ---


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; InputError if it returns anything else."""
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
    """Refuse what optimizer() or lr_lambda() return if another number of ranks has them return something else.

    steps: of the whole training.
    """
    results = []
    for rank, world_size in ((0, 1), (1, 2)):
        seed_all(0)  # rates may be drawn
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
    """Return what lr_lambda() gives for a few of the steps; InputError if that is no finite number."""
    return [finite_number(recipe, "lr_lambda", step, steps) for step in sorted({0, 1, steps // 2, steps - 1})]


def _plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of the parameter groups, as far as they can be compared."""
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
    """Have torch.distributed and torchrun's variables say, within the block, that this is that rank of so many."""
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
