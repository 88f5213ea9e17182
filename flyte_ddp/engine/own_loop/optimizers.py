"""The optimizers of a loop of the user's own: which are kept, and for which a checkpoint has to wait."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

MOST_WAITED = 256  # steps
LEFT_OUT = (
    f"a checkpoint has no gradients, and an optimizer has some that it has not stepped by in {MOST_WAITED} steps: a "
    "resume begins without them"
)


class Optimizers:
    """Those among the parts that loop.keep has been given, and in parts that wrap them.

    Attributes:
        waited: how many steps a checkpoint has waited in a row.
    """

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = parts
        self._known: list[Optimizer] = []  # to be among them
        self._stepped: list[Optimizer] = []  # in the current step, or the last one
        self.waited = 0

    def begin_step(self) -> None:
        self._stepped = []

    def have(self, optimizer: Optimizer) -> bool:
        if not _is_among(optimizer, self._known):
            self._known = self._now()  # a wrapper may have made it by now
        return _is_among(optimizer, self._known)

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.append(optimizer)

    def wait(self) -> bool:
        """Whether a checkpoint has to, as it has no gradients, and one of these has some to step by.

        Not without end: it may be that nothing is ever done with them.
        """
        idle = [one for one in self._now() if not _is_among(one, self._stepped)]
        has_gradients = any(weight.grad is not None for weight in _weights(idle))
        self.waited = self.waited + 1 if has_gradients else 0
        return 0 < self.waited <= MOST_WAITED

    def weights(self) -> list[Tensor]:
        """All that they change, which may be a loss's own, too."""
        return _weights(self._now())

    def _now(self) -> list[Optimizer]:
        parts = [*self._parts.values()]
        # A schedule has its optimizer, but does not keep it
        wrappers = [part for part in parts if hasattr(part, "__dict__") and not isinstance(part, LRScheduler)]
        held = [value for part in wrappers for value in vars(part).values()]
        inner = [one for value in held for one in (value if isinstance(value, list) else [value])]
        return [one for one in (*parts, *inner) if isinstance(one, Optimizer)]


def _is_among(optimizer: Optimizer, others: Iterable[Optimizer]) -> bool:
    return any(one is optimizer for one in others)


def _weights(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
