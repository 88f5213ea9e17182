"""The forward pass of a training step, with all that the ranks have to add up."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.measures import compute_pairs, trained_measure
from flyte_ddp.recipe import Recipe


class _Reaching(torch.autograd.Function):
    """A loss as it is, whose backward pass reaches all parameters.

    DDP would wait for the gradient of a parameter that this rank's samples have not used, and fail. So that parameter
    gets 0.
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
    saves a second all-reduce, and all ranks know the same sums at the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        names: Sequence[str],
        world_size: int,
        autocast: bool,
    ):
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.names = names
        self.world_size = world_size
        self.autocast = autocast
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.sizes = [2 * len(names), 2]  # values and weights by name; requests to stop and to save
        # The dtype is explicit, here and elsewhere, because a user's model() may have changed torch's default
        self.carrier = nn.Parameter(torch.zeros(sum(self.sizes), dtype=torch.float32, device=recipe.device))

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the forward pass, and compute the measures of each sample.

        Args:
            batch: n samples.

        Returns:
            Two tensors. The first, (), is the sum over the samples of the measure to minimise: the loss, or "objective"
            if there is one. The second, (2 k, n) float32 without a graph, has the value and weight of each of the k
            measures, alternating.
        """
        outputs = self.outputs(batch)
        pairs = self.pairs(outputs, batch)
        with torch.no_grad():
            measured = torch.stack([*chain.from_iterable(pairs.values())])
        return pairs[trained_measure(self.names)][0].sum(), measured

    def outputs(self, batch: Batch) -> Any:
        """Return what the recipe's forward makes of a batch, in the precision of the training."""
        self.recipe.share = batch.share
        with self._cast():
            return self.recipe.forward(self.model, batch.tree)

    def pairs(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return values and weights of each measure, both (samples,) float32, by its name."""
        self.recipe.share = batch.share
        with self._cast():
            return compute_pairs(self.recipe, outputs, batch, self.names)

    def trained(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sum over the samples of the measure that is trained, the loss or objective, ()."""
        return self.pairs(outputs, batch)[trained_measure(self.names)][0].sum()

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.carrier.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def forward(self, *of_part: Any) -> Tensor:
        """Return the loss to call backward() on, (): the sum of the samples' losses, times the number of ranks.

        A sample's "objective" takes the place of its loss if the recipe has one. The number of ranks makes up for
        DistributedDataParallel, which averages gradients over the ranks. backward() also adds this part's sums of
        measures and requests, times the number of ranks, to carrier.grad. After the last part, DistributedDataParallel
        averages carrier.grad, too, so it has the sums over all ranks.

        Args:
            *of_part: the arguments of compute_sums(): a part of the batch, this rank's requests to stop and to save,
                and whether it is the last part. The requests count only with the last part.
        """
        trained, sums = self.compute_sums(*of_part)
        # backward(gradient) would save this product, but imports sympy
        return self.world_size * (trained + self.carrier @ sums)

    def compute_sums(self, batch: Batch, requests: tuple[bool, bool], is_last: bool) -> tuple[Tensor, Tensor]:
        """Run the forward pass, and compute all that the ranks add up besides the gradients.

        Args:
            batch: a part of this rank's samples of the step.
            requests: whether this rank asks to stop, and to save. They count in the last part alone.
            is_last: whether this is the last of the rank's parts in this step.

        Returns:
            The sum over the samples of the measure that is trained, (). And (2 k + 2,) float32 without a graph: the
            sums of values and weights of the k measures, alternating, and then the two requests as 0 or 1.
        """
        trained, each = self.compute(batch)
        with torch.no_grad():
            sums = torch.empty_like(self.carrier)
            measured, asked = sums.split(self.sizes)
            torch.sum(each, 1, out=measured)
            asked.copy_(constants(tuple(float(request and is_last) for request in requests), sums.device))
        return trained, sums

    def reach_all(self, loss: Tensor) -> Tensor:
        """Return the same loss, whose backward pass then gives each unused parameter a gradient of 0."""
        reached: Tensor = _Reaching.apply(loss, *self.trainable)
        return reached

    def split(self, sums: Tensor, norms: Tensor) -> "Totals":
        """Return the Totals of a step, from the sum of all ranks' gradients of `carrier`, and the gradients' norms."""
        measured, asked = sums.split(self.sizes)
        return Totals(measured, asked, norms)


class Totals(NamedTuple):
    """The sums of all ranks in a step, besides the gradients.

    Attributes:
        measured: value and weight of each measure, alternating.
        asked: how many ranks asked to stop, and to save.
        norms: the norm of each parameter's gradient.
    """

    measured: Tensor
    asked: Tensor
    norms: Tensor


class SingleStep(nn.Module):
    """A Step on a rank that is alone, and what the steps of several ranks have in common with it."""

    def __init__(self, step: Step):
        super().__init__()
        self.module = step

    def forward(self, *of_part: Any) -> Tensor:
        trained, sums = self.module.compute_sums(*of_part)
        carrier = self.module.carrier  # past autograd, where nothing is reduced: a tenth of a small network's step
        carrier.grad = sums if carrier.grad is None else carrier.grad + sums
        return trained if trained.requires_grad else trained + 0 * carrier.sum()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (*self.module.trainable, self.module.carrier):
            parameter.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which a backward pass only adds to this rank's gradients, before the rank's last part."""
        return nullcontext()

    def parts(self, batch: Batch, most: int) -> list[Batch]:
        """Cut the rank's share into parts, as many on each rank, since layers and losses may exchange something.

        A part has at most this many samples; 0 gives a single part. A rank with fewer samples repeats a part, whose
        repetition counts for nothing.
        """
        return batch.parts(most, self.module.world_size)

    def add_up_gradients(self, backward: Callable[[], None]) -> Totals:
        """Run the forward and backward passes, and add up the gradients of all ranks; a collective.

        Afterwards each parameter has as its gradient the sum over the global batch. If no sample has used a parameter,
        its gradient is None or 0.

        Args:
            backward: runs the forward and backward passes of this rank's samples. It is called once; with virtual ranks
                maybe twice.

        Returns:
            The sums over all ranks: values and weights of the measures, and how many ranks ask to stop and to save.
            Also the norm of each summed gradient that is not None.
        """
        backward()
        sums = self.module.carrier.grad
        assert sums is not None  # after a backward pass
        return self.module.split(sums, torch_compat.norms(list_gradients(self.module)))

    def finish_part(self, is_last: bool) -> None:
        """Do nothing. ExactStep, with virtual ranks, adds up the gradients of the part here."""


class ReplicatedStep(SingleStep):
    """A Step on all ranks, each of which has the whole network."""

    def __init__(self, step: Step, has_unused: bool = False):
        """Replicate a step on all ranks.

        Args:
            step: the step.
            has_unused: whether steps may leave parameters unused on all ranks, as an expert's. To know which, each step
                looks at its whole graph.
        """
        super().__init__(step)
        self._has_unused = has_unused
        self.replicated = torch_compat.SettledBuckets(
            step, gradient_as_bucket_view=True, find_unused_parameters=has_unused
        )
        # TrainingState.train_step broadcasts buffers. As an argument its name would depend on torch's version
        self.replicated.broadcast_buffers = False

    def forward(self, *args: Any) -> Tensor:
        loss: Tensor = self.replicated(*args)
        return loss if self._has_unused else self.module.reach_all(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.replicated.no_sync()


@functools.lru_cache(maxsize=1000)  # copying them to a device would make the host wait at each step
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a cached tensor of these values, (len(values),) float32, which the caller must not change."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def list_gradients(step: Step) -> list[Tensor]:
    return [parameter.grad for parameter in step.trainable if parameter.grad is not None]
