"""The optimizers of a loop of the user's own: which are kept, and which gradients they have not stepped by."""

from collections.abc import Iterable, Mapping
from itertools import chain
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
        """Return whether the optimizer is one of these."""
        if optimizer not in self._known:
            self._known = self._now()  # a wrapper may have made it by now
        return optimizer in self._known

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Record which gradients the optimizer has stepped by. Torch calls it after each step of any optimizer."""
        self._stepped.append(optimizer)
        for weight in list_weights([optimizer]):
            if weight.grad is not None:
                self._stepped_by[weight.grad] = version(weight.grad)

    def pending(self, only_idle: bool = False) -> dict[int, Tensor]:
        """Return the gradients that no optimizer has applied since they last changed.

        Args:
            only_idle: whether to leave out gradients of optimizers that have stepped in this training step.

        Returns:
            The gradients, detached but not copied, by the index of their weight in weights().
        """
        left_out = {id(weight) for weight in list_weights(self._stepped if only_idle else [])}
        gradients = {number: weight.grad for number, weight in enumerate(self.weights()) if id(weight) not in left_out}
        return {
            number: gradient.detach()
            for number, gradient in gradients.items()
            if gradient is not None and self._stepped_by.get(gradient) != version(gradient)
        }

    def put_back(self, pending: Mapping[int, Tensor]) -> None:
        """Give the weights copies of these gradients, which pending() has returned in an earlier attempt."""
        weights = self.weights()
        for number, gradient in pending.items():
            weights[number].grad = gradient.to(weights[number].device, copy=True)

    def weights(self) -> list[Tensor]:
        """Return the weights that the optimizers change, each once. They may include a loss's own weights."""
        return list_weights(self._now())

    def _now(self) -> list[Optimizer]:
        """Return the optimizers that are parts of loop.keep, attributes of such parts, or in a list in an attribute.

        Attributes of learning-rate schedules are left out. An optimizer may be listed twice.
        """
        parts = [*self._parts.values()]
        # A schedule has its optimizer, but does not keep it
        wrappers = [part for part in parts if hasattr(part, "__dict__") and not isinstance(part, LRScheduler)]
        for part in wrappers:
            for value in vars(part).values():
                parts += value if isinstance(value, list) else [value]
        return [one for one in parts if isinstance(one, Optimizer)]


class PendingGradients:
    """Gradients that no optimizer has stepped by. A checkpoint can have them only if all ranks have the same.

    Attributes:
        of_weights: the gradients that the next checkpoint has, by the position of their weight in Optimizers.weights().
        has_given_up: whether a checkpoint has waited MOST_WAITED steps in vain, so that the next one has no gradients.
    """

    def __init__(self, optimizers: Optimizers, device: torch.device):
        self._optimizers, self._device = optimizers, device
        self.of_weights: dict[int, Tensor] = {}
        self._waited, self.has_given_up = 0, False

    def wait(self) -> bool:
        """Return whether a checkpoint has to wait because unapplied gradients differ between ranks; a collective.

        A checkpoint stores one copy of these gradients for all ranks. The ranks compare all of them first. If these
        differ, the ranks compare only the gradients of optimizers that have not stepped in this training step.

        The method sets of_weights to the gradients to store, and has_given_up:

        - If one of the comparisons finds no difference, the result is False. of_weights has the gradients compared.
        - If both find a difference, the result is True. of_weights is empty.
        - If both find a difference after MOST_WAITED times True in a row, the result is False. of_weights is empty, and
          has_given_up is True.
        """
        # After its optimizer has stepped, a weight may get a gradient that is set to zero before the next step: in a
        # GAN, one network's loss also reaches the weights of the other. Hence the second comparison
        for only_idle in (False, True):
            self.of_weights = self._optimizers.pending(only_idle)
            if not differ_between_ranks(self.of_weights.values(), self._device):
                self._waited, self.has_given_up = 0, False
                return False
        self.of_weights = {}
        self._waited += 1
        self.has_given_up = self._waited > MOST_WAITED
        return not self.has_given_up


def list_weights(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the weights in the groups of these optimizers, each once."""
    groups = chain.from_iterable(one.param_groups for one in optimizers)
    weights = chain.from_iterable(group["params"] for group in groups)
    return [*{id(weight): weight for weight in weights}.values()]
