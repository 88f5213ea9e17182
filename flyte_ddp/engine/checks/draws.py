"""A look at what draws random numbers, and at the lines of the user's code that it is called from."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import flyte_ddp
from flyte_ddp.code.code_version import is_installed
from flyte_ddp.engine.torch_compat import TorchDispatchMode, arguments_of

TRANSFORMS = "torchvision.transforms"  # compared with names: ranks that don't use it are not to import it
OURS = str(Path(flyte_ddp.__path__[0], "engine"))


class Draws(TorchDispatchMode):
    """A block in which it is noted which of torch's operations draw random numbers.

    Attributes:
        has_drawn: whether one of them has.
        transforms: how often each of torchvision's transforms has, by the place that calls it and its name.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False
        self.transforms: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _really_draws(func, args, kwargs):
            self.has_drawn = True
            self.transforms.update(_calling_transform())
        return func(*args, **kwargs)


def _calling_transform() -> list[tuple[str, str]]:
    """Return 'file, line n' of the user's code and the innermost transform of torchvision that it called, if any."""
    frame, place, name = sys._getframe(1), "", ""
    while frame:
        file, kind = frame.f_code.co_filename, type(frame.f_locals.get("self"))
        if not name and kind.__module__.startswith(TRANSFORMS):
            name = kind.__name__
        if not place and not file.startswith((OURS, "<")) and not is_installed(file):
            place = f"{file}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return [(place or "the network", name)] if name else []


def _really_draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws: attention and recurrent layers always call operations that may."""
    arguments = arguments_of(func, args, kwargs)
    probability = next((arguments[name] for name in ("dropout_p", "dropout", "p") if name in arguments), 1.0)
    is_training = next((arguments[name] for name in ("train", "training") if name in arguments), True)
    return bool(probability) and is_training is not False
