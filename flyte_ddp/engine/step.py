"""The forward pass of a training step, with all that the ranks have to add up."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.global_batch.ghost_batch_norm import constants
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.engine.measures import pairs_of, trained_measure
from flyte_ddp.recipe import Recipe

BITS = 16  # of the digest: two that differ are alike in these once in 65,536 times


class _Reaching(torch.autograd.Function):
    """A loss as it is, that reaches all parameters on the way back.

    One that no sample has used, such as an expert's, has no gradient otherwise; DDP would wait for it, and fail. So it
    gets 0, whether its samples are on other ranks or there are none, and an optimizer treats it alike on any number.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.count  # adds nothing to a gradient that there is


class Step(nn.Module):
    """Forward pass and measures of one rank's share of a batch, in a form that DDP reduces in one go.

    DDP averages the ranks' gradients. Here these are gradients of sums, so multiplied by the number of ranks they give
    the gradient of the sum over the global batch, however uneven the shares; it is divided by the global weight
    afterwards. The sums of the measures travel with them, as the gradient of a parameter that is never trained: that
    saves a second all-reduce, and all ranks know the same sums at the same step. So does what running statistics move
    towards, where batch norm goes by groups. And so do the bits of a digest of the shapes that random numbers were
    drawn for: if a bit's sum is neither 0 nor the number of ranks, these shapes differ. A rank whose parts differ among
    themselves gives halves.

    Attributes:
        digests: of the parts of this step.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        mode: GlobalBatchMode,
        names: Sequence[str],
        world_size: int,
        autocast: bool,
    ):
        super().__init__()
        self.model, self.recipe, self.mode, self.names = model, recipe, mode, names
        self.world_size, self.autocast = world_size, autocast
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Values and weights by name, running statistics, bits of the digest, requests to stop and to save
        bits = BITS if world_size > 1 or recipe.micro_batch else 0
        self.sizes = [2 * len(names), mode.running.size if mode.running else 0, bits, 2]
        self.digests: set[int] = set()
        # Here and elsewhere of a type that is said: a user's model() may have set another default
        self.carrier = nn.Parameter(torch.zeros(sum(self.sizes), dtype=torch.float32, device=recipe.device))

    def computed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of what is trained, and (2 k, samples) value and weight of each measure, alternating."""
        vars(self.recipe.share).update(vars(batch.share))
        if self.mode.running:
            self.mode.running.start()
        with torch.autocast(self.carrier.device.type, torch.bfloat16) if self.autocast else nullcontext():
            outputs = self.recipe.forward(self.model, batch.tree)
            pairs = pairs_of(self.recipe, outputs, batch, self.names)
        with torch.no_grad():
            measured = torch.stack([part for pair in pairs.values() for part in pair])
        self.digests.add(self.mode.digest)
        return pairs[trained_measure(self.names)][0].sum(), measured

    def forward(self, *of_part: Any) -> Tensor:
        trained, sums = self.summed(*of_part)
        # backward(gradient) would save this product, but imports sympy
        return self.world_size * (trained + self.carrier @ sums)

    def summed(self, batch: Batch, requests: tuple[bool, bool], is_last: bool) -> tuple[Tensor, Tensor]:
        """The sum of what is trained, and all else that the ranks add up, as the carrier's gradient.

        requests: whether to stop, and to save. is_last: of the parts that the rank's share is computed in.
        """
        trained, each = self.computed(batch)
        with torch.no_grad():
            sums = torch.empty_like(self.carrier)
            measured, statistics, bits, asked = sums.split(self.sizes)
            torch.sum(each, 1, out=measured)
            if self.mode.running:
                self.mode.running.write(statistics)
            if len(bits):
                bits.copy_(constants(bits_of(self.digests if is_last else {0}), sums.device))
            asked.copy_(constants(tuple(float(request and is_last) for request in requests), sums.device))
        return trained, sums

    def reaching(self, loss: Tensor) -> Tensor:
        """The loss, whose backward pass reaches all parameters."""
        reached: Tensor = _Reaching.apply(loss, *self.trainable)
        return reached

    def split(self, sums: Tensor, norms: Tensor) -> "Totals":
        """sums: of all ranks. norms: of the gradients."""
        measured, statistics, bits, asked = sums.split(self.sizes)
        # far from 0 whatever the rounding
        uneven = (bits * (self.world_size - bits)).amax() > 0.2 if len(bits) else None
        return Totals(measured, statistics, uneven, asked, norms)


class Totals(NamedTuple):
    """What the ranks have added up in a step, besides the gradients.

    Attributes:
        measured: value and weight of each measure, alternating.
        statistics: what running statistics move towards.
        uneven: whether the ranks drew for different shapes; None if that is not known.
        asked: how many ranks asked to stop, and to save.
        norms: of each parameter's gradient.
    """

    measured: Tensor
    statistics: Tensor
    uneven: Tensor | None
    asked: Tensor
    norms: Tensor


class SingleStep(nn.Module):
    """Step on a rank that is alone, and what the steps of several have in common."""

    def __init__(self, step: Step):
        super().__init__()
        self.module = step

    def forward(self, *of_part: Any) -> Tensor:
        trained, sums = self.module.summed(*of_part)
        carrier = self.module.carrier  # past autograd, where nothing is reduced: a tenth of a small network's step
        carrier.grad = sums if carrier.grad is None else carrier.grad + sums
        return trained if trained.requires_grad else trained + 0 * carrier.sum()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (*self.module.trainable, self.module.carrier):
            parameter.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Of a part that is not the last one."""
        return nullcontext()

    def parts(self, batch: Batch, most: int) -> list[Batch]:
        """Those that the rank's share is computed in, of at most so many samples."""
        return batch.parts(most)

    def added_up(self, backward: Callable[[], None]) -> Totals:
        """Runs forward and backward pass; then each parameter has the sum of its gradients on all ranks."""
        backward()
        for parameter in self.module.trainable:
            if parameter.grad is None:  # such as an unused expert's
                parameter.grad = torch.zeros_like(parameter)
        sums = self.module.carrier.grad
        assert sums is not None  # after a backward pass
        return self.module.split(sums, torch_compat.norms(gradients_of(self.module)))

    def finish_part(self, is_last: bool) -> None:
        """After the backward passes of one of the rank's parts."""

    def own_gradients(self, loss: Tensor) -> list[Tensor]:
        """Those of this rank's samples alone."""
        gradients = torch.autograd.grad(loss, self.module.trainable, allow_unused=True)
        return [gradient for gradient in gradients if gradient is not None]


class ReplicatedStep(SingleStep):
    """Step on all ranks, each of which has the whole network."""

    def __init__(self, step: Step):
        super().__init__(step)
        self.replicated = torch_compat.SettledBuckets(step, gradient_as_bucket_view=True)
        # Buffers are the same on all ranks, see mode.py (as an argument its name would depend on torch's version)
        self.replicated.broadcast_buffers = False

    def forward(self, *args: Any) -> Tensor:
        return self.module.reaching(self.replicated(*args))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.replicated.no_sync()


def gradients_of(step: Step) -> list[Tensor]:
    return [parameter.grad for parameter in step.trainable if parameter.grad is not None]


def bits_of(digests: set[int]) -> tuple[float, ...]:
    """The last bits of a digest; halves for several."""
    digest, *others = digests
    return tuple(0.5 if others else float(digest >> bit & 1) for bit in range(BITS))
