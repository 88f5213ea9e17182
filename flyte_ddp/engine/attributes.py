"""The rules for a recipe's attributes, and the layers that some of them name."""

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from flyte_ddp.errors import InputError
from flyte_ddp.fields import check_value, setting
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed


@dataclass(frozen=True)
class Attributes:
    """The rules of a recipe's attributes; Recipe says what they mean."""

    samples: str = setting("")
    headline: str = setting("")
    has_validation: bool = setting(False)
    clip_norm: float = setting(0.0, minimum=0)
    micro_batch: int = setting(0, minimum=-1)
    ema_decay: float = setting(0.0, minimum=0, below=1)
    passes_per_epoch: int = setting(1, minimum=1)
    length_window: int = setting(0, minimum=0)
    train_fraction: float = setting(1.0, above=0, maximum=1)


def check_attributes(recipe: Recipe) -> None:
    """Check the attributes of a recipe against their rules, and convert them to their declared types in place.

    A whole number such as 8.0 becomes 8, and a NumPy number becomes Python's. Attributes that list names, such as
    percent or fsdp_units, must be tuples or lists of strings.

    Raises:
        InputError: An attribute breaks its rule.
    """
    owner = type(recipe).__name__
    for field in dataclasses.fields(Attributes):
        value: Any = getattr(recipe, field.name)
        if isinstance(value, np.generic):
            value = value.item()
        # The recipe gets the value in its declared type, because 8.0 counts as a whole number; setattr() would refuse a
        # property
        vars(recipe)[field.name] = check_value(owner, field, value, field.metadata)
    for name in ("percent", "lower_is_better", "higher_is_better", "activation_checkpointing", "fsdp_units"):
        names = getattr(recipe, name)
        if not isinstance(names, (tuple, list)) or not all(isinstance(one, str) for one in names):
            raise InputError(f'{owner}.{name} must be a tuple of names, such as ("accuracy",), got {names!r}')


def matching_layers(recipe: Recipe, attribute: str, model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose names match the patterns in an attribute of the recipe.

    Names are those of named_modules(), such as "blocks.0". Patterns are those of fnmatch, such as "blocks.*". A layer
    within another matching layer is left out.

    Args:
        recipe: the recipe.
        attribute: the name of the attribute that has the patterns, such as "fsdp_units".
        model: the network.

    Returns:
        The layers by name; an empty dict if the attribute is empty.

    Raises:
        InputError: A pattern matches nothing, or a layer to return is a ModuleList or ModuleDict.
    """
    owner = f"{type(recipe).__name__}.{attribute}"
    layers = {name: one for name, one in model.named_modules() if name}
    chosen: list[str] = []
    for pattern in getattr(recipe, attribute):
        matches = fnmatch.filter(layers, pattern)
        if not matches:
            raise InputError(f"{owner} must match names of layers, got {pattern!r}: {listed([*layers])}")
        chosen += matches
    outermost = [name for name in dict.fromkeys(chosen) if not any(name.startswith(f"{one}.") for one in chosen)]
    for name in outermost:
        if isinstance(layers[name], (nn.ModuleList, nn.ModuleDict)):
            raise InputError(f'{owner} must name layers, but {name} only lists some: write "{name}.*"')
    return {name: layers[name] for name in outermost}
