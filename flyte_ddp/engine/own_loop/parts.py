"""Virtual ranks in a loop of the user's own: gradients that have the same bits on any number of ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.engine.audit import Backward
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.buffers import BufferCopy, Buffers
from flyte_ddp.engine.monitor.trace import Trace
from flyte_ddp.engine.own_loop.optimizers import list_weights
from flyte_ddp.engine.seeds import seed_part
from flyte_ddp.engine.step import Step, Totals, list_gradients
from flyte_ddp.engine.torch_compat import any_batch_size, scale, version
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.errors import InputError

Loss = Callable[[Any], Tensor]
AddUp = Callable[[Backward, Sequence[Batch], int], Totals]


class Parts:
    """A rank's parts of a global batch, one for each virtual rank that it computes. Only Loop.backward can use them.

    Attributes:
        shares: the parts.
    """

    def __init__(self, shares: Sequence[Batch]):
        self.shares = shares

    def __iter__(self) -> Iterator[Any]:
        raise InputError(
            "a batch must go to loop.backward with virtual_ranks, as it has several parts: write loss = "
            "loop.backward(batch, loss_of), where loss_of(part) returns the mean loss of what a batch is otherwise"
        )


class ByParts(nn.Module):
    """A network whose gradients loop.backward computes part by part; it takes the place of DistributedDataParallel."""

    def __init__(self, module: nn.Module, virtual_ranks: int, is_in_step: Callable[[], bool]):
        super().__init__()
        self.module, self._is_in_step = module, is_in_step
        self.exact = ExactGradients(module, virtual_ranks)

    def no_sync(self) -> Any:
        raise InputError("no_sync must not be called with virtual_ranks: a batch has parts already, see loop.backward")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._is_in_step() and torch.is_grad_enabled() and not self.exact.is_computing:
            raise InputError(
                "with virtual_ranks a step's gradients must come from loop.backward(batch, loss_of), which adds them "
                "up: call the network within loss_of, or, where nothing is trained, within torch.no_grad()"
            )
        return self.module(*inputs, **named)


class ExactGradients:
    """A network's gradients of the mean loss over the parts of a global batch, the same bits on any number of ranks.

    Attributes:
        parallel: the step that adds the gradients of the parts up.
        add_up: called as add_up(backward, shares, call). Adds up the gradients that backward(shares) computes, and may
            audit them; `call` is the number of this call in its step, from 0.
        is_computing: whether backward() is running.
        trace: what writes digests of steps; None without it.
    """

    def __init__(self, model: nn.Module, virtual_ranks: int):
        self._step = _LossStep(model)
        self.parallel = ExactStep(self._step, virtual_ranks)
        step = self.parallel
        self.add_up: AddUp = lambda backward, shares, call: step.add_up_gradients(partial(backward, shares), call)
        self._weights = [*model.parameters()]
        self._is_trained = [weight.requires_grad for weight in self._weights]
        self._buffers = Buffers(model)
        self.is_computing = False
        self.trace: Trace | None = None

    def watch(self, networks: Mapping[str, nn.Module]) -> None:
        """Have backward() refuse a loss_of that changes one of these networks, by name, as it must leave weights."""
        self._step.watch(networks)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise InputError if a weight of the optimizer has a gradient, but is not in this network."""
        ours = {id(weight) for weight in self._weights}
        stepped = [weight for weight in list_weights([optimizer]) if weight.grad is not None]
        others = [tuple(weight.shape) for weight in stepped if id(weight) not in ours]
        if others:
            raise InputError(
                "with virtual_ranks all weights that an optimizer changes must be in the network that loop.wrap is "
                f"given, got another one of shape {others[0]}: put the network and the loss into one module"
            )

    def backward(self, parts: Parts, loss_of: Loss, step_seed: int, call: int) -> Tensor:
        """Compute the gradients of the mean of all parts' losses, and add them to the weights' gradients; a collective.

        Each part begins with the same buffers. Afterwards all ranks have the buffers that part 0 has left. The parts
        are computed once, or twice in the first step and when gradients do not fit the units in which they are summed.
        In an audited step one part is computed more often. If a gradient is not finite, all gradients become NaN.

        Args:
            parts: this rank's parts.
            loss_of: returns the mean loss of a part, given its tensors.
            step_seed: the seed of the step, from which each part's random numbers follow.
            call: the number of this call in its step, from 1.

        Returns:
            The mean of the losses of all parts of all ranks, () float32, without a graph.

        Raises:
            InputError: Other weights require a gradient than when the network was wrapped. loss_of changes a weight, or
                returns no loss. An operation has no deterministic version. Or, in an audited step, gradients have other
                bits each time that a rank computes them.
            WrongBitsError: In an audited step, ranks compute other bits from the same samples.
        """
        if [weight.requires_grad for weight in self._weights] != self._is_trained:
            raise InputError(
                "with virtual_ranks the same parameters must be trained in each step: call requires_grad_ before "
                "loop.wrap, or train without virtual_ranks"
            )
        before = self._buffers.copy()
        self._step.loss_of = loss_of

        def computed(shares: Sequence[Batch]) -> None:
            after: BufferCopy | None = None
            if self.trace:
                self.trace.begin_backward(call)
            for share in shares:
                before.put_back()
                seed_part(step_seed, share.share.part, call)
                with any_batch_size():
                    copied = self.parallel.parts(share, 0)[0]
                    if self.trace:
                        self.trace.begin_part(share.share.part, copied.tree, call)
                    loss = self.parallel(copied, (False, False), share is shares[-1])
                    if self.trace:
                        self.trace.end_part(loss)
                    loss.backward()
                if share.share.count == 1:  # of a single value, batch norm's variance is no number
                    before.replace_not_finite()
                after = after or self._buffers.copy()
                self.parallel.finish_part(share is shares[-1])
            if after:
                after.put_back()

        earlier = [(weight, weight.grad.clone()) for weight in self._step.trainable if weight.grad is not None]
        self.parallel.zero_grad()
        self.is_computing = True
        try:
            totals = self.add_up(computed, parts.shares, call - 1)
        finally:
            self.is_computing = False
        self._buffers.broadcast()
        loss, weight = totals.measured
        scale(list_gradients(self._step), weight.reciprocal())
        for parameter in self._step.trainable:
            if parameter.grad is not None:  # the step's memory is used again, and the user may keep the gradient
                parameter.grad = parameter.grad.clone()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self.trace:
            self.trace.record_gradients()
        return (loss / weight).float()  # of which a mean of equal ones on all ranks has the same bits


class _LossStep(Step):
    """A step whose loss is what a function of the user's returns for a part, in place of a recipe's measures."""

    loss_of: Loss

    def __init__(self, model: nn.Module):
        nn.Module.__init__(self)
        self.model, self.names = model, ("loss",)
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.carrier = nn.Parameter(self.trainable[0].new_zeros(0))
        names = [name for name, _ in model.named_parameters()]
        self._places = [_find_place(model, name) for name in names]

    def watch(self, networks: Mapping[str, nn.Module]) -> None:
        """Have compute() raise InputError if loss_of changes a weight or buffer of these networks.

        Args:
            networks: networks besides self.model, such as a teacher, by their names for the message. Tensors that
                belong to self.model as well are left out: its weights are checked anyway, and its buffers may change.
        """
        own = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        for prefix, network in networks.items():
            for name, tensor in (*network.named_parameters(), *network.named_buffers()):
                if id(tensor) not in own:
                    _, owner, attribute = _find_place(network, name)
                    self._places.append((f"{prefix}.{name}", owner, attribute))

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute a part's mean loss by loss_of.

        Args:
            batch: the part.

        Returns:
            The loss, (), on which the caller can call backward(). And the measures, (2, 1) float64 without a graph: the
            loss and its weight, 1.

        Raises:
            InputError: loss_of changes a weight of the wrapped network, or a weight or buffer that watch() was given.
                Or it returns anything but a tensor without dimensions that depends on the network.
        """
        before = self._versions()
        loss = self.loss_of(batch.tree)
        for (name, _, _), now, earlier in zip(self._places, self._versions(), before, strict=True):
            if now != earlier:
                raise InputError(
                    f"with virtual_ranks loss_of must change no weight, as a rank calls it for each of its parts, and "
                    f"{name} was changed: change it after the optimizer's step, or make it a buffer of the network "
                    "that is wrapped, by register_buffer"
                )
        if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                "loop.backward: loss_of must return a part's mean loss, a tensor of no dimension that depends on the "
                f"network, got {kind}"
            )
        measured = torch.stack([loss.detach().double(), loss.new_ones((), dtype=torch.float64)])
        return loss, measured.view(2, 1)

    def _versions(self) -> list[tuple[int, ...]]:
        """Return, for each watched tensor, numbers that differ once the tensor is changed, moved or replaced."""
        tensors = [getattr(module, name) for _, module, name in self._places]
        return [(id(tensor), version(tensor), tensor.data_ptr()) for tensor in tensors]


def _find_place(network: nn.Module, name: str) -> tuple[str, nn.Module, str]:
    """Return a tensor's name, the layer of the network that has the tensor, and the name of the layer's attribute."""
    layer, _, attribute = name.rpartition(".")
    return name, network.get_submodule(layer), attribute
