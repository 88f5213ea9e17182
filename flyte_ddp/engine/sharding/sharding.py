"""The sharding of a network that is too large for one GPU, by torch's fully_shard.

fully_shard is FSDP2 (Zhao et al. 2023, arXiv 2304.11277). Each rank keeps some rows of every weight, and of its
gradient and optimizer state. A unit, such as a transformer's block, is made whole on all ranks just before it computes.
Its gradients are added up over the ranks and cut into rows as soon as they are there. Weights that belong to no unit
are the last unit, which is whole while the others compute.

Networks that are not sharded pass through these functions as they are.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.attributes import matching_layers
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.sharding.mesh import copies
from flyte_ddp.engine.step import SingleStep, Step, Totals, list_gradients
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

OFF = "or set options.sharding to off"
# Layers that do everything with their weights in bfloat16 under autocast
CAST = (
    nn.Linear, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
OVERRIDDEN = "forward", "_conv_forward"  # methods by which a derived class may compute in another way
# Patterns of torch's errors, the method to blame for each, and what is wrong with it
PROBLEMS = {
    "DTensor": ("forward", "weights are whole only while {layers} are called: call these rather than what is inside"),
    "RegisterPostBackwardFunction": (
        "forward",
        "{layers} must not change their inputs in place: set inplace=False, or copy these",
    ),
    "storage of size 0": (
        "forward",
        "gradients of gradients would need weights that are cut again by then: do without create_graph=True",
    ),
    # The first call of model() may have been without values, and functools.cache, say, may keep some of its tensors
    r"\bmeta\b": ("model", "a tensor that is kept between calls has no values: make it in each call"),
}
# Optimizers that treat each number by itself, so that a rank can update its rows without the others
BY_ELEMENT = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def is_sharded(model: nn.Module) -> bool:
    """Return whether a network, or a unit of it, is sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded until shard() has imported it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_shard(tensor: Any) -> bool:
    """Return whether an object is a sharded tensor, torch's DTensor, of which this rank has some rows."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, in the same memory. Other tensors are returned as they are."""
    if not is_shard(tensor):
        return tensor
    rows: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return rows


# --- the network ---


def shard(recipe: Recipe, networks: Sequence[nn.Module], mesh: Any, precision: str) -> None:
    """Shard networks in place, and move them to the device with rank 0's weights and buffers; a collective.

    Each layer in fsdp_units is moved and then sharded, so only one at a time is whole on the device.

    Args:
        recipe: the recipe, which names the layers and has the device.
        networks: the network to train, and others, such as its average, on the CPU. On ranks other than 0 their tensors
            may be on torch's meta device.
        mesh: what make_mesh returned.
        precision: the precision of the first network, "float32" or "bfloat16". The others are float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # this import is slow

    for network in networks:
        is_cast = precision == "bfloat16" and network is networks[0]
        policy = _in_bfloat16(network) if is_cast else MixedPrecisionPolicy()
        for buffer in network.buffers():
            _move_from_first(buffer, recipe.device)
        for unit in (*matching_layers(recipe, "fsdp_units", network).values(), network):
            for weight in unit.parameters():
                if not is_shard(weight):
                    _move_from_first(weight, recipe.device)
            # The last unit, too: torch would leave it whole after an evaluation
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)


def _in_bfloat16(network: nn.Module) -> Any:
    """Return the policy by which fully_shard gathers in bfloat16 those weights that autocast would convert to bfloat16.

    Less is sent, and results stay the same. Other weights, such as those of embeddings and norms, are gathered in
    their own dtype. Gradients are added up in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    others = (layer.parameters(recurse=False) for layer in network.modules() if not _is_cast(layer))
    kept = {id(weight) for weight in chain.from_iterable(others)}
    return MixedPrecisionPolicy(
        torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda weight: weight.dtype if id(weight) in kept else None,
    )


def _is_cast(layer: nn.Module) -> bool:
    """Return whether autocast surely converts all of a layer's weights to bfloat16 before it computes with them.

    True for torch's own layers in CAST. False for a class derived from one of these with a forward of its own, and for
    a layer with a hook before its forward, such as spectral_norm's: they may compute in float32.
    """
    kinds = [kind for kind in CAST if isinstance(layer, kind)]
    pairs = product(kinds, OVERRIDDEN)
    is_own = all(getattr(type(layer), name, None) is getattr(kind, name, None) for kind, name in pairs)
    return bool(kinds) and is_own and not torch_compat.has_forward_pre_hooks(layer)


def _move_from_first(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor, as the same object, to the device, and overwrite it with rank 0's values; a collective."""
    if tensor.is_meta:
        give_room(tensor, device)
    else:
        tensor.data = tensor.detach().to(device).contiguous()
    distributed.broadcast(tensor.detach().view(-1).view(torch.uint8), 0)  # backends cannot send all types


def give_room(tensor: Tensor, device: torch.device) -> None:
    """Allocate memory on the device for a tensor that is on torch's meta device.

    The tensor is changed in place, so tied weights stay tied. Its values are undefined afterwards.

    Raises:
        RuntimeError: Another tensor is a view of this one.
    """
    room = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    is_parameter = isinstance(tensor, nn.Parameter)
    torch.utils.swap_tensors(tensor, nn.Parameter(room, tensor.requires_grad) if is_parameter else room)


def in_own_types(model: nn.Module) -> AbstractContextManager[None]:
    """Exchange a sharded network's weights in their own dtype while the block runs, for evaluations in float32.

    A network that isn't sharded is left alone.
    """
    return torch_compat.gather_in_own_dtype(unit for unit in model.modules() if is_sharded(unit))


@contextmanager
def on_trial(recipe: Recipe, model: nn.Module) -> Iterator[None]:
    """Restore a sharded network's weights and buffers after the block, in which the network is tried.

    Use this as a context manager. Within the block, the network exchanges weights in their own dtype. After the block,
    its gradients are removed. If the block raises an error, nothing is restored. For a network that isn't sharded,
    nothing is done: the caller can try a copy of it.

    Args:
        recipe: the recipe, for messages.
        model: the network.

    Raises:
        InputError: The block raised an error of torch that sharding explains, such as for a weight that is used outside
            of its layer in fsdp_units.
    """
    if not is_sharded(model):
        yield
        return
    kept = {name: local(value).clone() for name, value in _tensors(model)}
    try:
        with in_own_types(model):
            yield
    except RuntimeError as error:
        named = (entry for pattern, entry in PROBLEMS.items() if re.search(pattern, str(error)))
        method, problem = next(named, ("", ""))
        if not problem:
            raise
        reason = problem.format(layers=f"the network, and the layers that {type(recipe).__name__}.fsdp_units names,")
        raise InputError(f"{code_location(recipe, method)}: with sharding, {reason}, {OFF}") from error
    model.zero_grad()
    for name, value in _tensors(model):
        if name in kept and local(value).shape == kept[name].shape:
            local(value).copy_(kept[name])


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


# --- its step ---


class ShardedStep(SingleStep):
    """A step on all ranks of a sharded network.

    The network adds up its gradients by itself, after each part: until the last part they would be whole.
    """

    def __init__(self, step: Step, has_unused: bool = False):
        """Prepare the network.

        Args:
            step: the step of one rank.
            has_unused: whether steps may leave parameters unused on all ranks, as an expert's. If so, the host waits
                for the device in each step.
        """
        super().__init__(step)
        self._has_unused = has_unused
        step.model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # those of experts, for example

    def forward(self, *args: Any) -> Tensor:
        return self.module.reach_all(self.module(*args))

    def add_up_gradients(self, backward: Callable[[], None]) -> Totals:
        """Run the forward and backward passes, and compute the norms of the gradients over all ranks; a collective.

        The backward pass sums the gradients over all ranks, and each rank keeps its rows of the sums. With has_unused,
        a gradient that is 0 on all ranks becomes None: torch gives 0 to a weight that no rank has used.

        Args:
            backward: runs the forward and backward passes of this rank's samples.

        Returns:
            The sums of the measures and requests over all ranks, and the norm of each whole gradient.
        """
        backward()
        sums = self.module.carrier.grad
        assert sums is not None  # after a backward pass
        squares = torch_compat.norms([local(gradient) for gradient in list_gradients(self.module)]).double().square()
        totals = torch.cat([sums.double(), squares / copies()])
        distributed.all_reduce(totals)
        norms = totals[len(sums) :].sqrt().float()
        if self._has_unused:
            weights = [weight for weight in self.module.trainable if weight.grad is not None]
            for weight, norm in zip(weights, norms.tolist(), strict=True):
                if not norm:
                    weight.grad = None
            norms = norms[norms != 0]
        return self.module.split((totals[: len(sums)] / self.module.world_size).float(), norms)


def update_own_rows(optimizer: Optimizer) -> Optimizer:
    """Make a sharded network's optimizer update this rank's rows of the weights, and return the optimizer.

    The optimizer is changed in place. In its groups and state, plain tensors with the rows replace the sharded weights,
    so fused optimizers work, too. Hooks give these tensors their gradients before each step, and remove the gradients
    after it. If no weight is sharded, nothing is changed.

    Raises:
        InputError: The optimizer is not one of torch.optim's in BY_ELEMENT, which update each number by itself.
    """
    updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    weights = [weight for weight in updated if is_shard(weight)]
    if not weights:
        return optimizer
    if type(optimizer) not in [getattr(torch.optim, name) for name in BY_ELEMENT]:
        raise InputError(
            f"with sharding, the optimizer must be one of torch.optim's {', '.join(BY_ELEMENT)}, which treat each "
            f"number by itself, got {type(optimizer).__name__}: choose one of these, {OFF}"
        )
    rows = {weight: nn.Parameter(local(weight), weight.requires_grad) for weight in weights}
    for group in optimizer.param_groups:
        group["params"] = [rows.get(weight, weight) for weight in group["params"]]
    for weight, row in rows.items():
        if weight in optimizer.state:  # some optimizers have state from the start
            before = optimizer.state.pop(weight)
            optimizer.state[row] = {name: local(value) for name, value in before.items()}

    def take_gradients(*_: Any) -> None:
        for weight, row in rows.items():
            row.grad = None if weight.grad is None else local(weight.grad)

    def leave_gradients(*_: Any) -> None:
        for row in rows.values():  # gradients would take memory until the next step
            row.grad = None

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(leave_gradients)
    return optimizer
