"""The optimizers of a loop of the user's own: which are kept, and which gradients they have not stepped by."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from flyte_ddp.engine.digest import differ_between_ranks
from flyte_ddp.engine.torch_compat import version

MOST_WAITED = 256  # steps
LEFT_OUT = (
    "a checkpoint has no gradients in which ranks differ, and an optimizer has some that it has not stepped by in "
    f"{MOST_WAITED} steps: a resume begins without them"
)


class Optimizers:
    """The optimizers among the parts that loop.keep was given, and in parts that wrap an optimizer."""

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
        for weight in list_weights([optimizer]):
            if weight.grad is not None:
                self._stepped_by[weight.grad] = version(weight.grad)

    def pending(self, idle_alone: bool = False) -> dict[int, Tensor]:
        """Return the gradients that no optimizer has applied since they last changed.

        Args:
            idle_alone: leaves out the weights of optimizers that have stepped in this step. Their gradients came after
                the step, and most loops set them to zero. That happens in a GAN, where one network's loss also reaches
                the weights of the other.

        Returns:
            The gradients by the position of their weight in weights().
        """
        left_out = {id(weight) for weight in list_weights(self._stepped if idle_alone else [])}
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
        """Return the weights that the optimizers change, each once. They may include a loss's own weights."""
        return list_weights(self._now())

    def _now(self) -> list[Optimizer]:
        parts = [*self._parts.values()]
        # A schedule has its optimizer, but does not keep it
        wrappers = [part for part in parts if hasattr(part, "__dict__") and not isinstance(part, LRScheduler)]
        held = [value for part in wrappers for value in vars(part).values()]
        inner = [one for value in held for one in (value if isinstance(value, list) else [value])]
        return [one for one in (*parts, *inner) if isinstance(one, Optimizer)]


class PendingGradients:
    """Gradients that no optimizer has stepped by, for which a checkpoint may have to wait.

    Attributes:
        of_weights: the gradients that the next checkpoint has, by their weights' place in Optimizers.weights().
        has_given_up: whether a checkpoint has waited in vain, and the next one has none of them.
    """

    def __init__(self, optimizers: Optimizers, device: torch.device):
        self._optimizers, self._device = optimizers, device
        self.of_weights: dict[int, Tensor] = {}
        self._waited, self.has_given_up = 0, False

    def wait(self) -> bool:
        """Return whether a checkpoint has to wait, as rank 0 would write gradients that are its own; a collective.

        The wait has an end, as it may be that nothing is ever done with these gradients.
        """
        for idle_alone in (False, True):
            self.of_weights = self._optimizers.pending(idle_alone)
            if not differ_between_ranks(self.of_weights.values(), self._device):
                self._waited, self.has_given_up = 0, False
                return False
        self.of_weights = {}
        self._waited += 1
        self.has_given_up = self._waited > MOST_WAITED
        return not self.has_given_up


def list_weights(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return each of their weights once."""
    weights = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    return [*{id(weight): weight for weight in weights}.values()]


def _is_among(optimizer: Optimizer, others: Iterable[Optimizer]) -> bool:
    return any(one is optimizer for one in others)
