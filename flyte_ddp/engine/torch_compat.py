"""The private parts of torch that this package uses, as of version 2.15.0: see tests/compat."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from flyte_ddp.errors import InputError

# pytree: nested tuples, lists and dicts of tensors, as DataLoader and DDP take them; torch has no public module for it.
# TorchDispatchMode: sees each operation, even within layers; torch's notes describe it, but it has no public module.
__all__ = ["TorchDispatchMode", "pytree"]


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether a layer is one of torch's batch norm layers, or of a class derived from one."""
    return isinstance(layer, _BatchNorm)


@contextmanager
def any_batch_size() -> Iterator[None]:
    """Let batch norm train on a batch with a single value per channel while the block runs; a context manager.

    Torch otherwise refuses such a batch by a ValueError. The change holds for all networks in this process.
    """
    check = F._verify_batch_size  # type: ignore[attr-defined]
    F._verify_batch_size = lambda size: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        F._verify_batch_size = check  # type: ignore[attr-defined]


def name_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of torch's operations by name, including defaults.

    Args:
        operation: the operation, as a TorchDispatchMode receives it.
        args: its positional arguments.
        kwargs: its other arguments, without those that have their default value.
    """
    declared = operation._schema.arguments
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in declared), args, strict=False)), **kwargs}


def count_in_total(counter: Any) -> Any:
    """Make a FlopCounterMode count all operations together instead of by layer, and return the same counter.

    Args:
        counter: the FlopCounterMode, which is changed in place.
    """
    # To count by layer, it hooks the inputs of layers. The hooks make torch.autograd.grad() fail for an input that is a
    # leaf, such as the positions of atoms, and there is no public option to leave them out
    counter.mod_tracker = nullcontext()
    counter.mod_tracker.parents = {"Global"}
    return counter


class SettledBuckets(DistributedDataParallel):
    """A DistributedDataParallel whose buckets stay as they are.

    After its first backward pass, DistributedDataParallel arranges its buckets anew, in the order in which gradients
    came. Where a gradient lies decides in which order three or more ranks add it up. So the first step of a resumed
    training, and that one alone, would have other bits than the same step of a training that was never interrupted.
    Here the buckets are arranged at once: the last layers first, as gradients come.
    """

    def __init__(self, module: nn.Module, **options: Any):
        with last_layers_first(module):
            super().__init__(module, **options)
            self.trained = [name for name, weight in _by_layer(module) if weight.requires_grad]
        settle_buckets(self)


def _by_layer(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and parameter of each weight, in the order in which DistributedDataParallel numbers them.

    A tied weight is yielded once, under its first name.
    """
    seen = set[int]()
    for layer_name, layer in module.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield f"{layer_name}.{name}".removeprefix("."), weight


@contextmanager
def naming_unused(replicated: SettledBuckets) -> Iterator[None]:
    """Turn DistributedDataParallel's error about unused parameters into an InputError with their names.

    It is a context manager. All other errors of the block are raised as they are.

    Args:
        replicated: the wrapper that the block calls. The error names parameters of the network in it.

    Raises:
        InputError: The block raised torch's error that parameters had no gradient in the step before.
    """
    try:
        yield
    except RuntimeError as error:
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if not numbers:
            raise
        names = ", ".join(replicated.trained[int(number)] for number in numbers[1].split())
        raise InputError(
            f"each parameter must have a gradient in each step, and {names} had none: call loop.wrap with "
            "find_unused_parameters=True, or leave them out of the network"
        ) from None


@contextmanager
def last_layers_first(module: nn.Module) -> Iterator[None]:
    """Make a network's named_modules() list the layers in reverse order while the block runs; a context manager.

    In the block, the caller wraps the network in DistributedDataParallel, whose buckets then begin with the last
    layers.
    """
    layers = list(module.named_modules())
    module.named_modules = lambda *_, **__: reversed(layers)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.named_modules


def settle_buckets(replicated: DistributedDataParallel) -> None:
    """Arrange the buckets in the order of the layers, for good; a collective."""
    replicated.reducer._push_all_rebuilt_params()
    replicated.reducer._rebuild_buckets()


def copy_network(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy of a network. The copy shares only the given tensors with the original.

    Some layers keep tensors that were computed from their weights, such as those of torch.nn.utils.weight_norm.
    deepcopy refuses these tensors, so the copy gets detached copies of their values.

    Args:
        model: the network, which is not changed.
        shared: the tensors that are not copied.
    """
    attributes = chain.from_iterable(vars(layer).values() for layer in model.modules())
    kept = [value for value in attributes if isinstance(value, Tensor) and value.grad_fn]
    return deepcopy(model, {id(one): one.detach().clone() for one in kept} | {id(one): one for one in shared})


def copy_with_hooks(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network with the hooks on its parameters' gradients, which deepcopy leaves out."""
    copied = copy_network(model)
    for new, old in zip(copied.parameters(), model.parameters(), strict=True):
        if old.requires_grad:
            for hook in (old._backward_hooks or {}).values():
                new.register_hook(hook)
            for hook in (old._post_accumulate_grad_hooks or {}).values():
                new.register_post_accumulate_grad_hook(hook)
    return copied


def has_gradient_hooks(weight: Tensor) -> bool:
    """Return whether something is called with a weight's gradient, once that is computed or accumulated."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def has_forward_pre_hooks(layer: nn.Module) -> bool:
    """Return whether something is called before a layer's forward.

    It may compute with the layer's weights, as spectral_norm's hook does.
    """
    return bool(layer._forward_pre_hooks)


def guard_steps(optimizer: Optimizer, flag: Tensor, divisor: Tensor) -> bool:
    """Make a fused optimizer skip its steps while flag is 1, and else divide the gradients in place in each step.

    A fused optimizer reads both tensors on the device in each step, so the host does not wait.

    Args:
        optimizer: the optimizer.
        flag: () float32, 1 if steps are to be skipped, and else 0. The caller changes it in place.
        divisor: () float32, what the gradients are divided by. The caller changes it in place.

    Returns:
        True if the optimizer now does so; False, without any change, if it is not fused or does not support it.
    """
    # torch.amp.GradScaler uses the same mechanism, but it also scales the loss and waits for the device
    can = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not (can and all(group.get("fused") for group in optimizer.param_groups)):
        return False
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    return True


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether a step of the optimizer runs torch's own code alone: no subclass of a user's, and no hook."""
    own_hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    all_hooks = (*own_hooks, *_global_optimizer_pre_hooks, *_global_optimizer_post_hooks)
    return type(optimizer).__module__.startswith("torch.optim.") and not all_hooks


# Many tensors in one call: one at a time, a GPU would wait for the host, and a small network has dozens of them


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of each of N tensors, (N,); torch.nn.utils.get_total_norm returns only that of all."""
    return torch.stack(torch._foreach_norm(tensors)) if tensors else torch.zeros(0)


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by a factor that is on their device."""
    torch._foreach_mul_(tensors, factor)


def move_towards(tensors: list[Tensor], targets: list[Tensor], share: float) -> None:
    """Move each tensor in place by a share of the way to its target."""
    torch._foreach_lerp_(tensors, targets, share)


def copy(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its tensor."""
    torch._foreach_copy_(tensors, sources)


@contextmanager
def gather_in_own_dtype(units: Iterable[Any]) -> Iterator[None]:
    """Let FSDP units gather weights in the weights' own dtype while the block runs; a context manager.

    Outside of the block, a unit with mixed precision gathers its weights in a lower precision, such as bfloat16.
    """
    groups = [*chain.from_iterable(unit._get_fsdp_state()._fsdp_param_groups for unit in units)]
    cast = {}
    for param in chain.from_iterable(group.fsdp_params for group in groups):
        if param.mp_policy.param_dtype not in (None, param.sharded_param.dtype):
            cast[param] = param.mp_policy

    def gather(policies: dict[Any, Any]) -> None:
        for param, policy in policies.items():
            param.mp_policy = policy
            param.all_gather_outputs = []
            vars(param).pop("_unsharded_param", None)  # made again, in the other type
        for group in groups if policies else ():
            group._init_mp_dtypes()

    gather({param: replace(policy, param_dtype=None) for param, policy in cast.items()})
    try:
        yield
    finally:
        gather(cast)


def trained_weights(unit: Any) -> list[nn.Parameter]:
    """Return the sharded weights of an FSDP unit that are trained, in the order in which it sends their gradients.

    Torch has no public way to ask for the order.
    """
    return [param.sharded_param for param in _trained_params(unit)]


def _trained_params(unit: Any) -> list[Any]:
    groups = unit._get_fsdp_state()._fsdp_param_groups
    params = chain.from_iterable(group.fsdp_params for group in groups)
    return [param for param in params if param.sharded_param.requires_grad]


def hook_whole_gradients(unit: Any, call: Callable[[int], None]) -> None:
    """Register a function that torch calls in a backward pass for each trained weight of an FSDP unit; a collective.

    In each later pass, torch calls `call` when this rank's gradient of a whole weight is complete, before the ranks
    share out its rows. A weight that the pass does not use causes no call. The ranks gather the unit's weights once
    here, so all of them must call this function.

    Args:
        unit: a module that fully_shard was applied to, in a network that has run forward before.
        call: gets the position of the weight in trained_weights(unit).
    """
    # Torch's own hooks of the sharded weights run for unused weights, too
    unit.unshard()  # the whole weights are tensors of their own, which stay the same ones
    unit.reshard()
    for number, param in enumerate(_trained_params(unit)):
        param._unsharded_param.register_post_accumulate_grad_hook(lambda _, number=number: call(number))


def use_backward_hooks(unit: Any) -> None:
    """Make an FSDP unit notice the end of its backward pass by hooks on its inputs, instead of by an autograd function.

    The unit is changed in place. A sharded network then computes the same bits as the same network without sharding.

    Args:
        unit: a module that fully_shard was applied to.
    """
    # Torch's autograd function makes a sharded network differ in two ways from the same one without sharding. The
    # gradients of a tensor that is used in the unit and elsewhere are added up in another order. A layer that checks
    # whether two of its inputs are the same tensor finds that they are not
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        group._register_post_backward_hook = partial(_hook_inputs, group)


def _hook_inputs(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Have an FSDP unit add up its gradients across ranks as soon as its inputs' gradients are computed.

    The inputs get a hook that calls group.post_backward. No hook is added while gradients are off, during a backward
    pass, or if no input has a gradient. In the last case, torch itself calls group.post_backward at the end of the
    backward pass.

    Args:
        group: torch's own object for the weights of the unit.
        args: the positional arguments of the unit's forward.
        kwargs: the other arguments.

    Returns:
        args and kwargs, unchanged.
    """
    is_in_backward = torch._C._current_graph_task_id() != -1  # where layers compute again, the hooks are there already
    if torch.is_grad_enabled() and not is_in_backward:
        # A leaf, such as a parameter, would keep the hook for the next steps
        inputs = {id(one): one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.grad_fn}
        if inputs:

            def finish(_: Any) -> None:
                handle.remove()  # or hooks and graph would hold one another, where only a full collection finds them
                group.post_backward()

            handle = torch.autograd.graph.register_multi_grad_hook([*inputs.values()], finish)
    return args, kwargs


def after_backward(loss: Tensor, call: Callable[[], None]) -> None:
    """Call a function at the end of the loss's backward pass, when this rank has computed all gradients.

    The call comes before DistributedDataParallel waits for the other ranks, because callbacks run in the order in which
    they were queued. Hooks of the gradients cannot tell which gradient is the last.
    """
    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(call))


def prefer_deterministic() -> None:
    """Make torch's operations deterministic in this process, and let torch warn of each operation that cannot be.

    Tensors from torch.empty stay uninitialized. (With deterministic algorithms, torch would fill them by default.)
    """
    # The public torch.use_deterministic_algorithms(True, warn_only=True) imports the compiler, which takes longer than
    # importing torch itself
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def only_deterministic() -> Iterator[None]:
    """Raise an InputError for an operation in the block that has no deterministic version.

    It is a context manager, and a decorator. Outside of the block, torch only warns of such an operation. Nothing is
    refused if deterministic algorithms are off when the block begins, as a recipe may turn them off. Other errors pass
    unchanged, such as torch's about CUBLAS_WORKSPACE_CONFIG.

    Raises:
        InputError: The block uses such an operation. The message names it.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise InputError(
            f"{operation} has other bits each time, as torch has no deterministic version of it, and virtual_ranks "
            "promises the same bits: use another operation, or set virtual_ranks to 0"
        ) from error
    finally:
        torch._C._set_deterministic_algorithms(True, warn_only=warns)


def may_round_to_tf32() -> bool:
    """Return whether float32 matrix products or cuDNN's convolutions on a GPU may be computed in TF32."""
    # Torch has an old and a new name for each of these settings. An old name raises an error where a recipe has used
    # the new one
    backends: Any = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return any(backend.fp32_precision == "tf32" for backend in backends)


def version(tensor: Tensor) -> int:
    """Return a number that grows with each change of the tensor in place."""
    return tensor._version


def broadcast_together(tensors: list[Tensor]) -> None:
    """Overwrite the tensors with rank 0's values; a collective.

    Many tensors travel in one message. An empty list sends nothing.

    Args:
        tensors: dense tensors that need no gradient, of the same shapes and dtypes on all ranks.
    """
    if tensors:
        group: Any = distributed.group.WORLD
        distributed._broadcast_coalesced(group, tensors, 250 << 20, 0)  # type: ignore[attr-defined]


def device_generator(device: torch.device) -> torch.Generator:
    """Return the device's default generator.

    Seeding it directly avoids torch.manual_seed, which without a GPU formats tracebacks, so that a step takes 2 to 4 %
    longer.
    """
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def batch_order(loader: DataLoader[Any]) -> tuple[str, Any]:
    """Return the name and the value of the loader's sampler attribute.

    The attribute is batch_sampler, or sampler if the loader has no batch_sampler.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return name, getattr(loader, name)


def set_batch_order(loader: DataLoader[Any], order: Iterable[Any]) -> None:
    """Make a loader read its batches in another order, in every iteration that begins after the call.

    The loader's batch_sampler, sampler and len() stay as they were: only what the loader yields changes.

    Args:
        loader: the loader, which is changed in place.
        order: replaces the loader's batch_sampler, so it yields a list of indices for each batch. If the loader has no
            batch_sampler, it replaces the sampler, and yields single indices. Each iteration of the loader iterates
            over `order` anew.
    """
    # DataLoader refuses to set a new sampler, and a new DataLoader would lose what a subclass adds
    name, _ = batch_order(loader)

    def iterator() -> Any:
        reader = shallow_copy(loader)
        vars(reader)[name] = order
        return type(loader)._get_iterator(reader)

    loader._get_iterator = iterator  # type: ignore[method-assign]
