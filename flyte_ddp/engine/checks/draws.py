"""Finds the random numbers that a recipe draws, and the lines of the user's code that draw them."""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flyte_ddp
from flyte_ddp.code.code_version import is_installed
from flyte_ddp.engine.torch_compat import TorchDispatchMode, arguments_of, pytree

TRANSFORMS = "torchvision.transforms"  # compared with names: ranks that don't use it are not to import it
# The remedy for other random numbers
DRAWN = "torch draw, in augment() from its argument random, in the network by torch.rand, randn, randint or bernoulli"


class Draws(TorchDispatchMode):
    """Counts the random numbers that torch's operations draw.

    Attributes:
        counts: how many, by place and operation, or the transform of torchvision that called it.
        transforms: the names of these.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str]] = Counter()
        self.transforms: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _really_draws(func, args, kwargs):
            drawn = sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self.counts[self._caller(func.name().removeprefix("aten::").partition(".")[0])] += drawn
        return result

    def _caller(self, operation: str) -> tuple[str, str]:
        """'file, line n' of the user's code that the call comes from, and the layer, transform or operation that
        draws."""
        frame, lines, transform = sys._getframe(2), [], ""
        while frame:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.RNNBase):
                operation = owner.mode.split("_")[0]
            elif type(owner).__module__.startswith(TRANSFORMS):
                transform = transform or type(owner).__name__
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        self.transforms |= {transform} - {""}
        return users_line(iter(lines)) or "the network", transform or operation


def _really_draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Attention and recurrent layers always call operations that may draw; their dropout says whether they do."""
    arguments = arguments_of(func, args, kwargs)
    probability = next((arguments[name] for name in ("dropout_p", "dropout", "p") if name in arguments), 1.0)
    is_training = next((arguments[name] for name in ("train", "training") if name in arguments), True)
    return bool(probability) and is_training is not False


def users_line(lines: Iterator[tuple[str, int]]) -> str:
    """The innermost line of code that is neither installed nor ours; empty if there is none."""
    ours = str(Path(flyte_ddp.__path__[0], "engine"))
    places = (
        f"{file}, line {line}" for file, line in lines if not file.startswith((ours, "<")) and not is_installed(file)
    )
    return next(places, "")


def host_state() -> Any:
    """The state of numpy's and Python's random number generators, which changes when something draws from them."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), keys.tobytes(), position  # type: ignore[union-attr]
