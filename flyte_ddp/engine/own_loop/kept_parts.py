"""The parts that loop.keep was given, and their content in a checkpoint.

Besides their state dicts it has what no state dict says: the weights that are trained, and in which group each
optimizer has them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flyte_ddp.engine.checkpoints.checkpoint import check_readable
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.own_loop.optimizers import Optimizers, PendingGradients
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.model_files.frozen_base import add_module_versions

Groups = list[list[str]]


class KeptParts(dict[str, Any]):
    """The parts of a loop by their names, as loop.keep was given them; "model" is the network itself.

    Attributes:
        optimizers: those among the parts.
        pending: the gradients that no optimizer has applied.
        first_shapes: the shapes that loop.keep has found, as shapes() returns them.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.first_shapes: dict[str, dict[str, torch.Size]] = {}
        self._device = device
        self.optimizers = Optimizers(self)
        self.pending = PendingGradients(self.optimizers, device)

    def networks(self) -> dict[str, nn.Module]:
        """Return the parts that are networks."""
        return {name: part for name, part in self.items() if isinstance(part, nn.Module)}

    def shapes(self) -> dict[str, dict[str, torch.Size]]:
        """Return the shapes of all tensors in the networks' state dicts: {name in loop.keep: {tensor's name: shape}}.

        Parameters of lazy layers that have no shape yet are left out.
        """
        return {
            name: {
                key: value.shape
                for key, value in network.state_dict().items()
                if isinstance(value, Tensor) and not nn.parameter.is_lazy(value)
            }
            for name, network in self.networks().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of everything that loop.keep was given.

        Tensors are not copied, so the next step changes them. Call pending.wait() before: it decides which gradients
        are in the result.

        Returns:
            "parts": each part's state dict, by name. "arrangement": what arrangement() returns. "gradients": those that
            no optimizer has applied.

        Raises:
            InputError: A part that is no network or optimizer has state of a type that could not be loaded again.
        """
        states = {name: part.state_dict() for name, part in self.items()}
        # A list of the user's may have got an array since loop.keep checked it. Networks and optimizers, which are
        # large, keep their types.
        own = {name: states[name] for name, part in self.items() if not isinstance(part, (nn.Module, Optimizer))}
        check_readable({"parts": own})
        return {
            "parts": states,
            "arrangement": arrangement(self),
            "gradients": self.pending.of_weights,
        }

    def load_state_dict(self, saved: Mapping[str, Any], is_within_epoch: bool) -> None:
        """Restore everything that loop.keep was given, from a state whose tensors are copied.

        With is_within_epoch, this leaves out gradients, and parameter groups that the user's code has yet to add. Then
        call put_back() before the first step.

        Args:
            saved: what state_dict() has returned.
            is_within_epoch: whether the checkpoint was written within an epoch.

        Raises:
            InputError: The state does not fit what loop.keep was given.
        """
        with _fitting():
            if saved["parts"].keys() != self.keys():
                raise ValueError(f"it has {', '.join(saved['parts'])}")
            states, arranged = saved["parts"], saved["arrangement"]
            if is_within_epoch:
                states, arranged = without_later_groups(self, states, arranged)
            load(self, states, arranged)
            if not is_within_epoch:
                self.optimizers.put_back(saved["gradients"])

    def put_back(self, saved: Mapping[str, Any]) -> None:
        """Restore networks, optimizers, schedules and gradients a second time, after a resume within an epoch.

        Call this right before the first step: the user's code before the steps has run again, and may have changed
        these parts. Other parts, such as iterators, are left alone.

        Args:
            saved: the state that load_state_dict() was given.

        Raises:
            InputError: The state does not fit what loop.keep was given.
        """
        kinds = nn.Module, Optimizer, LRScheduler
        with _fitting():
            parts = {name: part for name, part in self.items() if isinstance(part, kinds)}
            load(parts, saved["parts"], saved["arrangement"])
            self.optimizers.put_back(saved["gradients"])

    def buffer_places(self) -> set[tuple[Any, ...]]:
        """Return the keys under which state_dict() has buffers: "parts", the part's name and the buffer's."""
        return {
            ("parts", part_name, name)
            for part_name, network in self.networks().items()
            for name, _ in network.named_buffers(remove_duplicate=False)
        }

    def buffer_digests(self) -> dict[str, int]:
        """Return the digest of each buffer of the networks, by a name such as "model.bn.running_mean"."""
        digests = {
            f"{part_name}.{name}": compute_sum(buffer).to(self._device)
            for part_name, network in self.networks().items()
            for name, buffer in network.named_buffers()
        }
        values = torch.stack([*digests.values()]).tolist() if digests else []
        return dict(zip(digests, values, strict=True))


@contextmanager
def _fitting() -> Iterator[None]:
    """Raise InputError, "the checkpoint does not fit what loop.keep was given", for errors of the block.

    Use this as a context manager around the code that loads a checkpoint. Errors of the device, such as out of memory,
    and of unusual types, such as OSError, pass unchanged.
    """
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the checkpoint does not fit what loop.keep was given: {' '.join(str(error).split())}: keep the same, "
            "or drop it by RunOptions(resume=False)"
        ) from None


def arrangement(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what no state dict says: which weights are trained, and which are in each group of each optimizer.

    Args:
        parts: what loop.keep was given, by name. Only networks and optimizers count.

    Returns:
        "trained": for each weight's name, such as "model.fc.weight", whether it requires a gradient. "groups": for each
        optimizer's name, the names of the weights in each of its groups; "" for a weight that is in no network.
    """
    weights = _weights(parts)
    return {
        "trained": {name: weight.requires_grad for name, weight in weights.items()},
        "groups": {name: _groups(part, weights) for name, part in parts.items() if isinstance(part, Optimizer)},
    }


def load(parts: Mapping[str, Any], states: Mapping[str, Any], arranged: Mapping[str, Any]) -> None:
    """Load the states of parts of loop.keep, and restore which weights are trained and in which group each is.

    Tensors are copied. After an error, some parts may be changed already.

    Args:
        parts: what loop.keep was given, or some of it, by name. If an optimizer's groups have changed, the networks
            with its weights must be included.
        states: the saved state of each part, by name.
        arranged: what arrangement() returned when the states were saved.

    Raises:
        KeyError: A part has no state. Or an optimizer's groups have changed, and no network has one of their saved
            weights now.
        ValueError: An optimizer's groups have changed, and one of their saved weights was in no network.
        Exception: A part's load_state_dict refuses its state, with an error of its own.
    """
    weights = _weights(parts)
    for name, is_trained in arranged["trained"].items():
        if name in weights:
            weights[name].requires_grad_(is_trained)
    for name, part in parts.items():
        state = pytree.tree_map_only(Tensor, Tensor.clone, states[name])
        if isinstance(part, Optimizer):
            _load_optimizer(part, state, arranged["groups"][name], weights)
        elif isinstance(part, nn.Module):
            part.load_state_dict(add_module_versions(state, part))
        else:
            part.load_state_dict(state)


def without_later_groups(
    parts: Mapping[str, Any], states: Mapping[str, Any], arranged: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's states and arrangement without the parameter groups that its optimizers do not have yet.

    In a resume within an epoch, the user's code may add these groups later, by add_param_group. Load the result first,
    and everything once that code has run.

    An optimizer's state stays whole if its class overrides load_state_dict, or if the groups that it has now are not
    the first groups in the checkpoint.

    Args:
        parts: what loop.keep was given in this attempt, by name.
        states: the saved state of each part, by name.
        arranged: what arrangement() returned when the states were saved.

    Returns:
        New states and a new arrangement. Tensors are not copied.
    """
    now = arrangement(parts)["groups"]
    states, groups = {**states}, {**arranged["groups"]}
    for name, saved in groups.items():
        count = len(now[name])
        if count < len(saved) and saved[:count] == now[name] and _loads_as_torch_does(parts[name]):
            groups[name] = now[name]
            numbers = range(sum(map(len, now[name])))
            states[name] = {
                **states[name],
                "state": {number: state for number, state in states[name]["state"].items() if number in numbers},
                "param_groups": states[name]["param_groups"][:count],
            }
    return states, {**arranged, "groups": groups}


def _weights(parts: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return each weight of the networks among the parts once, by a name such as "model.fc.weight"."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for part_name, part in parts.items():
        for name, weight in part.named_parameters() if isinstance(part, nn.Module) else ():
            named.setdefault(id(weight), (f"{part_name}.{name}", weight))
    return dict(named.values())


def _groups(optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> Groups:
    names = {id(weight): name for name, weight in weights.items()}
    return [[names.get(id(weight), "") for weight in group["params"]] for group in optimizer.param_groups]


def _load_optimizer(
    optimizer: Optimizer, state: dict[str, Any], saved: Groups, weights: Mapping[str, nn.Parameter]
) -> None:
    """Restore an optimizer in place: its parameter groups and its state.

    The list of groups, and the dict of each group, stay the same objects unless the optimizer's class overrides
    load_state_dict.

    Args:
        optimizer: the optimizer.
        state: its saved state dict.
        saved: for each saved group, the names of its weights; "" for a weight that was in no network.
        weights: the networks' weights now, by name.

    Raises:
        KeyError: The groups differ from the saved groups, and a saved name is not in `weights`.
        ValueError: The groups differ from the saved groups, and a saved name is "". Or load_state_dict refuses the
            state.
    """
    groups = optimizer.param_groups
    options = [*groups]
    now = _groups(optimizer, weights)
    if now != saved:
        unknown = [*chain.from_iterable(saved)].count("")
        if unknown:
            raise ValueError(
                f"{type(optimizer).__name__} had {_shape(saved)}, now it has {_shape(now)}, and {unknown} of those "
                "weights are in nothing that it was given: give it the modules that have them"
            )
        optimizer.param_groups = [{"params": [weights[name] for name in group]} for group in saved]
    optimizer.load_state_dict(state)
    if _loads_as_torch_does(optimizer):
        # The user's code, or an optimizer that holds this one, may hold these very groups
        loaded = optimizer.param_groups
        for before, after in zip(options, loaded, strict=False):
            before.clear()
            before.update(after)
        groups[:] = [*options[: len(loaded)], *loaded[len(options) :]]
        optimizer.param_groups = groups


def _loads_as_torch_does(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


def _shape(groups: Groups) -> str:
    return f"{len(groups)} groups of {', '.join(str(len(group)) for group in groups)} weights"
