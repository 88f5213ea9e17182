"""Checks of a recipe's optimizer before training: a step, its rates, and state that no checkpoint would have."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from flyte_ddp.engine.checks.trials import fault_named, is_same
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.measures import code_location, finite_number
from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.engine.sharding.sharding import is_sharded, on_shards
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import explain_error, listed

SAVE_IT = "keep it in its state or param_groups, or add it to state_dict() and load_state_dict()"
# How many numbers are stepped on twice, and how many of a state are copied: megabytes and milliseconds, however large
# the network is
MOST_NUMBERS = 1 << 18
MOST_STATE = 1 << 24
# Steps before the state is saved, and after. An optimizer that looks ahead does so every few steps, and has only its
# weights then, so the first number is a multiple of no usual interval.
STEPS = 7, 10


def try_optimizer(recipe: Recipe, model: nn.Module, steps: int) -> list[str]:
    """Step the optimizer, which changes the weights that have a gradient from the last trial.

    Args:
        recipe: the recipe.
        model: a copy of the network, or the sharded network itself.
        steps: the number of steps of the whole training.

    Returns:
        A warning if a checkpoint would lack a part of the optimizer.
    """
    _some_rates(recipe, steps)
    if recipe.settings.virtual_ranks:
        _refuse_scaled_rates(recipe, model, steps)
    optimizer = _build_optimizer(recipe, model)
    is_whole = not is_sharded(model)
    what = f"{code_location(recipe, 'optimizer')}: {type(optimizer).__name__}"
    for weight in model.parameters():
        if is_whole and weight.grad is not None:  # any gradient will do; the weights themselves take no extra memory
            weight.grad = weight.detach()
    remedy = "choose one that needs no closure and takes dense gradients, such as torch.optim.AdamW"
    with fault_named(f"{what} cannot make a step", remedy):
        optimizer.step()
    if (
        not is_whole
    ):  # each rank steps its own rows of a sharded network, and a checkpoint has the state in another form
        return []
    lost = _lost_on_resume(recipe, model, optimizer)
    del optimizer  # its state is as large as the network, or twice as large
    _refuse_lost_state(recipe, model, what, lost)
    if not lost:
        return []
    keeps = f"{what} keeps {listed(lost)} outside of its state_dict, and a training that is resumed goes on without"
    return [f"{keeps}: {SAVE_IT}"]


def beside_state(optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return the numbers, and the sums of the tensors, in each attribute other than its state.

    Flags are left out, such as whether there was a step.
    """
    found = {}
    for name, value in vars(optimizer).items():
        if name.startswith("_") or name in ("state", "param_groups", "defaults"):
            continue
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Tensor, int, float))]
        numbers = [leaf for leaf in leaves if not isinstance(leaf, bool)]
        if numbers:
            found[name] = [compute_sum(one.detach()).item() if isinstance(one, Tensor) else one for one in numbers]
    return found


def _build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer. Raises InputError if it returns anything else."""
    optimizer = recipe.optimizer(model)
    where = code_location(recipe, "optimizer")
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"{where} must return one optimizer of torch.optim, got {type(optimizer).__name__}: parameters that are to "
            "be treated differently are groups of one optimizer"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InputError(
            f"{where} must return an optimizer without a scheduler of torch, got one: nothing calls its step(), so "
            "that rates stay as it begins, which may be 0; let lr_lambda(step, steps) return what multiplies the rate"
        )
    return on_shards(optimizer)


def _some_rates(recipe: Recipe, steps: int) -> list[float]:
    """Return what lr_lambda() returns for a few of the steps. Raises InputError if that is no finite number."""
    return [finite_number(recipe, "lr_lambda", step, steps) for step in sorted({0, 1, steps // 2, steps - 1})]


def _refuse_scaled_rates(recipe: Recipe, model: nn.Module, steps: int) -> None:
    """Refuse an optimizer() or lr_lambda() that returns something else among another number of ranks."""
    results = []
    for rank, world_size in ((0, 1), (1, 2)):
        seed_all(0)  # rates may be drawn
        with _among_ranks(rank, world_size):
            groups = [_plain(group) for group in _build_optimizer(recipe, model).param_groups]
            results.append({"optimizer": groups, "lr_lambda": _some_rates(recipe, steps)})
    one, two = results
    for method in one:
        if one[method] != two[method]:
            raise InputError(
                f"{code_location(recipe, method)}: with virtual_ranks what it returns must not depend on the rank or "
                "the number of ranks: read neither, since batch_size is that of all ranks together"
            )


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, as far as they can be compared."""
    kinds = (bool, int, float, str, tuple, Tensor)
    options = {name: value for name, value in group.items() if isinstance(value, kinds)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}


@contextmanager
def _among_ranks(rank: int, size: int) -> Iterator[None]:
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
    """The ranks' process group with another rank and size. All exchanges go through the real group."""

    def __init__(self, group: Any, rank: int, size: int):
        self._group = group
        self.rank = lambda: rank
        self.size = lambda: size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _lost_on_resume(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of attributes that are missing or differ in a new optimizer that has loaded the state_dict.

    Args:
        recipe: builds the new optimizer.
        model: the network.
        optimizer: one that has made a step.
    """
    kept = beside_state(optimizer)
    if not kept:  # torch's own optimizers keep nothing there, so their state need not be copied
        return []
    restored = _build_optimizer(recipe, model)
    restored.load_state_dict(optimizer.state_dict())
    found = beside_state(restored)
    return sorted(name for name, values in kept.items() if values != found.get(name))


def _refuse_lost_state(recipe: Recipe, model: nn.Module, what: str, lost: Sequence[str]) -> None:
    """Refuse an optimizer that goes on with other bits when it is resumed. Changes the weights.

    It steps two optimizers in turn on the same weights, those that have a gradient; of a large network, on the smallest
    of them alone. An optimizer that makes a state for all weights of a large network at once, as Adagrad does, is not
    tried: three such states may not fit into memory.

    Args:
        recipe: the recipe.
        model: a copy of the network.
        what: the optimizer's place and name, for messages.
        lost: the names of the attributes that it is known to keep outside of its state_dict.
    """
    with_gradient = sorted((one for one in model.parameters() if one.grad is not None), key=Tensor.numel)
    model.zero_grad()
    numbers = accumulate(weight.numel() for weight in with_gradient)
    weights = [weight for weight, count in zip(with_gradient, numbers, strict=True) if count <= MOST_NUMBERS]
    gradients = [weight.detach() + 0.01 for weight in weights]  # some weights begin as zeros
    first = _build_optimizer(recipe, model)
    try:
        _step(first, STEPS[0], weights, gradients)
        state = first.state_dict()
        if sum(leaf.numel() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)) > MOST_STATE:
            return
        state = pytree.tree_map_only(Tensor, Tensor.clone, state)
        before = [weight.detach().clone() for weight in weights]
        _step(first, STEPS[1], weights, gradients)
    except Exception:
        if len(weights) == len(with_gradient):
            raise
        return  # this optimizer needs a gradient for every weight, and the state of all may not fit into memory
    expected = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
    resumed = _build_optimizer(recipe, model)
    try:
        resumed.load_state_dict(state)
        _step(resumed, STEPS[1], weights, gradients)
    except Exception as error:
        raise InputError(
            f"{what} cannot go on from its own state_dict ({explain_error(error)}), so that no training could be "
            "resumed: let load_state_dict() take what state_dict() returns"
        ) from error
    if not all(map(is_same, weights, expected)):
        keeps = listed(lost) or "something, such as the optimizer that it holds,"
        raise InputError(
            f"{what} keeps {keeps} outside of its state_dict, so that a training that is resumed ends with other bits: "
            f"{SAVE_IT}"
        )


def _step(optimizer: Optimizer, count: int, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Step with the same random numbers and gradients each time this is called."""
    seed_all(count)
    for _ in range(count):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()  # a step may change the gradient, for instance by clipping
        optimizer.step()
