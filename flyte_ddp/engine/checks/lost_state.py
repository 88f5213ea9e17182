"""What an optimizer of a recipe keeps where no checkpoint looks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine.checks.comparison import optimizer_of
from flyte_ddp.engine.checks.trials import is_same
from flyte_ddp.engine.digest import sum_of
from flyte_ddp.engine.measures import code_location
from flyte_ddp.engine.torch_compat import device_generator, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed, reason_of

SAVE_IT = "keep it in its state or param_groups, or add it to state_dict() and load_state_dict()"
# How many numbers refuse_lost_state steps on, and how many of a state it copies: megabytes and milliseconds, however
# large the network is
MOST_NUMBERS, MOST_STATE = 1 << 18, 1 << 24
# Before the state is saved, and after: an optimizer that looks ahead does so every few steps, and has no more than its
# weights then, so seven is a multiple of no usual interval
STEPS = 7, 10


def refuse_lost_state(recipe: Recipe, model: nn.Module, lost: Sequence[str]) -> None:
    """Raise InputError if an optimizer that is resumed goes on with other bits. Changes the weights.

    Steps two optimizers in turn on the same weights, those that have a gradient; of a large network, on the smallest
    of them alone. An optimizer that makes a state for all weights of a large network at once, as Adagrad does, is not
    tried: three such states may not fit into memory.

    lost: the names of what it is known to keep outside of its state_dict.
    """
    weights, room = [], MOST_NUMBERS
    with_gradient = [weight for weight in model.parameters() if weight.grad is not None]
    for weight in sorted(with_gradient, key=Tensor.numel):
        room -= weight.numel()
        weight.grad = None
        weights += [weight] if room >= 0 else []
    gradients = [weight.detach() + 0.01 for weight in weights]  # some weights begin as zeros
    first = optimizer_of(recipe, model)
    kind = type(first).__name__
    where = f"{code_location(recipe, 'optimizer')}: {kind}"
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
        return  # it takes no weights without a gradient: there is no room for the state of all
    expected = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
    resumed = optimizer_of(recipe, model)
    try:
        resumed.load_state_dict(state)
        _step(resumed, STEPS[1], weights, gradients)
    except Exception as error:
        raise InputError(
            f"{where} cannot go on from its own state_dict ({reason_of(error)}), so that no "
            "training could be resumed: let load_state_dict() take what state_dict() returns"
        ) from error
    if not all(is_same(weight, value) for weight, value in zip(weights, expected, strict=True)):
        keeps = f"keeps {listed(lost)}" if lost else "keeps something, such as the optimizer that it holds,"
        raise InputError(
            f"{where} {keeps} outside of its state_dict, so that a training that is resumed ends with other bits: "
            f"{SAVE_IT}"
        )


def _step(optimizer: torch.optim.Optimizer, count: int, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Step with the same random numbers and gradients each time this is called."""
    devices = {weight.device for group in optimizer.param_groups for weight in group["params"]}
    generators = [torch.default_generator, *(device_generator(device) for device in devices)]
    for generator in generators:
        generator.manual_seed(count)
    for _ in range(count):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()  # a step may change it, as one that clips does
        optimizer.step()


def lost_on_resume(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what a new optimizer that gets the state_dict of this one, which has made a step, lacks, by name."""
    kept = beside_state(optimizer)
    if not kept:  # as by torch's own, whose state need not be copied for this
        return []
    restored = optimizer_of(recipe, model)
    restored.load_state_dict(optimizer.state_dict())
    found = beside_state(restored)
    return sorted(name for name, values in kept.items() if values != found.get(name))


def beside_state(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Return the numbers, and the sums of the tensors, in each attribute other than its state.

    Flags are left out, such as whether there was a step.
    """
    names = [name for name in vars(optimizer) if not name.startswith("_")]
    counted = {
        name: [
            sum_of(leaf.detach()).item() if isinstance(leaf, Tensor) else leaf
            for leaf in pytree.tree_leaves(getattr(optimizer, name))
            if isinstance(leaf, (Tensor, int, float)) and not isinstance(leaf, bool)
        ]
        for name in names
        if name not in ("state", "param_groups", "defaults")
    }
    return {name: values for name, values in counted.items() if values}
