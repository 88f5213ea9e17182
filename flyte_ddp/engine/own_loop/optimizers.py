"""The optimizers of a loop of the user's own: which are kept, and which gradients they have not stepped by."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from flyte_ddp.engine.torch_compat import version

MOST_WAITED = 256  # steps
LEFT_OUT = (
    "a checkpoint has no gradients in which ranks differ, and an optimizer has some that it has not stepped by in "
    f"{MOST_WAITED} steps: a resume begins without them"
)


class Optimizers:
    """Those among the parts that loop.keep has been given, and in parts that wrap them."""

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = parts
        self._known: list[Optimizer] = []  # to be among them
        self._stepped: list[Optimizer] = []  # in the current step, or the last one
        self._stepped_by = WeakTensorKeyDictionary()  # gradients, and the version that each had then

    def begin_step(self) -> None:
        self._stepped = []

    def have(self, optimizer: Optimizer) -> bool:
        if not _is_among(optimizer, self._known):
            self._known = self._now()  # a wrapper may have made it by now
        return _is_among(optimizer, self._known)

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the gradients that the optimizer has stepped by, until they change."""
        self._stepped.append(optimizer)
        for weight in weights_of([optimizer]):
            if weight.grad is not None:
                self._stepped_by[weight.grad] = version(weight.grad)

    def pending(self, idle_alone: bool = False) -> dict[int, Tensor]:
        """Return the gradients that no optimizer has stepped by, by their weights' place in weights().

        idle_alone: leave out those of optimizers that have stepped in this step: they came after it, and most loops set
        them to zero, as that of a GAN, in which one network's loss reaches the other's weights.
        """
        left_out = {id(weight) for weight in weights_of(self._stepped if idle_alone else [])}
        gradients = {number: weight.grad for number, weight in enumerate(self.weights()) if id(weight) not in left_out}
        return {
            number: gradient.detach()
            for number, gradient in gradients.items()
            if gradient is not None and self._stepped_by.get(gradient) != version(gradient)
        }

    def put_back(self, pending: Mapping[int, Tensor]) -> None:
        """Give the weights the gradients that were pending."""
        weights = self.weights()
        for number, gradient in pending.items():
            weights[number].grad = gradient.to(weights[number].device, copy=True)

    def weights(self) -> list[Tensor]:
        """All that they change, which may be a loss's own, too."""
        return weights_of(self._now())

    def _now(self) -> list[Optimizer]:
        parts = [*self._parts.values()]
        # A schedule has its optimizer, but does not keep it
        wrappers = [part for part in parts if hasattr(part, "__dict__") and not isinstance(part, LRScheduler)]
        held = [value for part in wrappers for value in vars(part).values()]
        inner = [one for value in held for one in (value if isinstance(value, list) else [value])]
        return [one for one in (*parts, *inner) if isinstance(one, Optimizer)]


def weights_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return each of their weights once."""
    weights = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    return [*{id(weight): weight for weight in weights}.values()]


def _is_among(optimizer: Optimizer, others: Iterable[Optimizer]) -> bool:
    return any(one is optimizer for one in others)
