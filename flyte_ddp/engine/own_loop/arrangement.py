"""The weights of a loop's parts that are trained, and in which group each optimizer has them: no state dict says so."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.model_files.frozen_base import with_versions

Groups = list[list[str]]


def arrangement(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what no state dict says: which weights are trained, and which are in each group of each optimizer.

    Returns:
        "trained": for each weight's name, such as "model.fc.weight", whether it requires a gradient. "groups": for each
        optimizer's name, the names of the weights in each of its groups. A weight that is in no network among the parts
        has an empty name.
    """
    weights = _weights(parts)
    return {
        "trained": {name: weight.requires_grad for name, weight in weights.items()},
        "groups": {name: _groups(part, weights) for name, part in parts.items() if isinstance(part, Optimizer)},
    }


def load(parts: Mapping[str, Any], states: Mapping[str, Any], arranged: Mapping[str, Any]) -> None:
    """Load the parts' states, and restore which weights are trained and in which groups the optimizers have them.

    Parts may be some of the loop's; an optimizer needs its networks among them if its groups have changed. Tensors are
    copied. Whether a weight that no part has now was trained is ignored. A state that does not fit raises the error of
    its part's load_state_dict. After any error, some parts may be changed already.

    Raises:
        KeyError: A part has no state, or an optimizer's saved groups differ from the present ones and have a weight
            that no network has now.
        ValueError: An optimizer's saved groups differ from the present ones, and had weights that were in no network.
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
            part.load_state_dict(with_versions(state, part))
        else:
            part.load_state_dict(state)


def without_later_groups(
    parts: Mapping[str, Any], states: Mapping[str, Any], arranged: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leave out of a checkpoint's states and arrangement the parameter groups that the optimizers do not have yet.

    It is for a resume within an epoch, when the user's code may still have to call add_param_group. The loop first
    loads what this function returns, copies as load() takes them. Once that code has run again, the loop loads the
    whole states.

    An optimizer's state is returned whole if its class overrides load_state_dict, or if the groups that it has now are
    not the first ones of the checkpoint.
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
    """Restore an optimizer: put the weights into the groups that `saved` names, and load its state dict.

    The optimizer is changed in place. The list of groups, and the dict of each group, stay the same objects if its
    load_state_dict is torch's own. ValueError is raised if the groups differ from the saved ones, and have weights that
    are in no network among the parts (""); or if load_state_dict refuses the state.
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
