"""What an optimizer of a recipe keeps where no checkpoint looks."""

from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine.checks.comparison import optimizer_of
from flyte_ddp.engine.digest import sum_of
from flyte_ddp.engine.measures import code_location
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed


def lost_on_resume(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """A warning if a new optimizer that gets the state_dict of this one, which has made a step, lacks some of it."""
    kept = beside_state(optimizer)
    if not kept:  # as by torch's own, whose state need not be copied for this
        return []
    restored = optimizer_of(recipe, model)
    restored.load_state_dict(optimizer.state_dict())
    found = beside_state(restored)
    lost = sorted(name for name, values in kept.items() if values != found.get(name))
    if not lost:
        return []
    keeps = f"{code_location(recipe, 'optimizer')}: {type(optimizer).__name__} keeps {listed(lost)}"
    remedy = "keep it in its state or param_groups, or add it to state_dict()"
    return [f"{keeps} outside of its state_dict, so that a training that is resumed goes on without: {remedy}"]


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
