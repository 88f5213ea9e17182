"""Refuses what a checkpoint of a loop of the user's own would lack, once an optimizer has made two steps."""

import gc
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flyte_ddp.engine.checks.optimizer_probe import numbers_outside_state
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.own_loop.kept_parts import KeptParts
from flyte_ddp.engine.own_loop.optimizers import list_weights
from flyte_ddp.engine.torch_compat import copy_network, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.text import listed

NEW = "a resume would begin with a new one"


class Unsaved:
    """A check that a checkpoint has all that a resume needs of each optimizer, its schedules and its weights.

    A loop has no trial, in which a second optimizer could be made and compared. So the optimizer's tensors and numbers
    are looked for among what the parts save, each once.
    """

    def __init__(self, parts: KeptParts):
        """Take what loop.keep is given, by name, which may still be empty."""
        self._parts = parts
        self._after_first: dict[int, dict[str, list[Any]]] = {}
        self._checked: list[Optimizer] = []
        self._buffers_after_first: dict[str, tuple[torch.Size, int]] = {}

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Check, after an optimizer's second step, that a checkpoint has all that its resume needs.

        torch calls it as a hook after each step of any optimizer. After an optimizer's first step the method records
        attributes and buffers to compare with. Later steps check nothing.

        Args:
            optimizer: the optimizer that has stepped.
            *_: torch's further arguments, which are ignored.

        Raises:
            InputError: A resume would lose something:

                - loop.keep lacks a schedule of this optimizer, or one of its weights.
                - The second step has changed a buffer that no state_dict has, or an attribute of the optimizer that its
                  state_dict lacks.
                - The optimizer's state_dict lacks the state of another optimizer that it holds.
                - The steps have created a buffer, or changed its shape, so that a resume could not load it.
        """
        if optimizer in self._checked:
            return
        if id(optimizer) not in self._after_first:
            self._after_first[id(optimizer)] = numbers_outside_state(optimizer)
            self._buffers_after_first = self._unsaved_buffers()
            return
        self._checked.append(optimizer)
        self._check_schedules(optimizer)
        self._check_state(optimizer)
        self._check_weights(optimizer)
        self._check_buffers()
        self._check_shapes()

    def _check_shapes(self) -> None:
        """Raise InputError if a resume could not load a buffer that is new, or has another shape than at loop.keep.

        Loading is tried in a copy of the network: some layers, such as torch's observers of quantization, can do it.
        """
        for part, now in self._parts.shapes().items():
            network = self._parts[part]
            first = self._parts.first_shapes[part]
            buffers = dict(network.named_buffers(remove_duplicate=False))
            late = [name for name, shape in now.items() if name in buffers and shape != first.get(name)]
            if not late:
                continue
            copied = copy_network(network)
            for name in late:
                layer, _, attribute = name.rpartition(".")
                before = buffers[name].new_empty(first[name]) if name in first else None
                setattr(copied.get_submodule(layer), attribute, before)
            try:
                copied.load_state_dict(network.state_dict())
            except RuntimeError:
                shape = f"the shape {tuple(now[late[0]])}"
                raise InputError(
                    f"loop.keep: the steps give the buffer {part}.{late[0]} {shape}, and the network that it was given "
                    "could not load it in a resume: create it in __init__ with the shape that it will have"
                ) from None

    def _check_buffers(self) -> None:
        """Raise InputError if a network's buffer with persistent=False has other values than after the first step.

        Such a buffer is in no state_dict, so a resume would lose its values. A buffer whose shape has changed is
        accepted: it is a cache, which is made again.
        """
        for name, now in self._unsaved_buffers().items():
            before = self._buffers_after_first.get(name, now)
            if now != before and now[0] == before[0]:  # a cache that grows is made again
                raise InputError(
                    f"loop.keep: the steps change the buffer {name}, which is in no state_dict, so that a resume would "
                    "go on without: register it with persistent=True"
                )

    def _unsaved_buffers(self) -> dict[str, tuple[torch.Size, int]]:
        """Return the shape and digest of each buffer that is missing in the state_dict of its network.

        The keys are names such as "model.norm.scale", which begin with the network's name in loop.keep.
        """
        found: dict[str, tuple[torch.Size, int]] = {}
        for prefix, part in self._parts.items():
            if isinstance(part, nn.Module):
                # Not by name, which some wrappers of layers change in the state_dict
                saved = {*map(id, part.state_dict(keep_vars=True).values())}
                for name, buffer in part.named_buffers():
                    if id(buffer) not in saved:
                        found[f"{prefix}.{name}"] = buffer.shape, int(compute_sum(buffer))
        return found

    def _check_schedules(self, optimizer: Optimizer) -> None:
        """Raise InputError if a live learning-rate schedule of the optimizer is in none of the parts of loop.keep.

        A schedule counts as kept if it is a part, an attribute of a part, or an attribute of such an attribute. Lists
        and dicts in attributes count, too. All live objects of the process are looked through.
        """
        kept = [*self._parts.values()]
        for _ in range(2):  # a schedule may be in a part, and in another schedule there
            kept += chain.from_iterable(map(_held, [*kept]))
        kept_ids = {*map(id, kept)}
        # All objects are looked through, since ReduceLROnPlateau leaves no mark on the optimizer as other schedules do
        for one in gc.get_objects():
            # type() and not isinstance(), which asks some objects for their __class__
            is_ours = issubclass(type(one), LRScheduler) and vars(one).get("optimizer") is optimizer
            if is_ours and id(one) not in kept_ids:
                raise InputError(
                    f"loop.keep must have the {type(one).__name__} of the {type(optimizer).__name__}: {NEW}: make it "
                    "before, and give it as in loop.keep(model=model, optimizer=optimizer, schedule=schedule)"
                )

    def _check_state(self, optimizer: Optimizer) -> None:
        """Raise InputError if the optimizer's state_dict lacks a number or tensor that its second step has changed.

        The method compares the optimizer's attributes with those that after_step() recorded after the first step. If an
        attribute holds another optimizer, which loop.keep was not given, the state_dict must have the state of that
        one, too. Call this once, after the second step: the record is removed.
        """
        kind = type(optimizer).__name__
        before, now = self._after_first.pop(id(optimizer)), numbers_outside_state(optimizer)
        changed = {name: values for name, values in now.items() if values != before.get(name)}
        kept = [id(part) for part in self._parts.values()]
        inner = [one for one in _held(optimizer) if isinstance(one, Optimizer) and id(one) not in kept]
        if not changed and not inner:
            return
        saved = _saved(optimizer)
        for one in inner:
            if not {*_values([*one.state.values()], only_tensors=True)} <= saved:
                raise InputError(
                    f"loop.keep: {kind} holds the {type(one).__name__}, whose state is not in the state_dict of "
                    f"{kind}, and {NEW}: add it there and to load_state_dict, or give both to loop.keep"
                )
        lost = [name for name, values in changed.items() if not {*values} <= saved]
        if lost:
            raise InputError(
                f"loop.keep: {kind} keeps {listed(lost)} outside of its state_dict, so that a resume would go on "
                "without: keep it in its state or param_groups, or add it to state_dict() and load_state_dict()"
            )

    def _check_weights(self, optimizer: Optimizer) -> None:
        """Raise InputError if a weight that the optimizer changes is in none of the parts of loop.keep.

        A weight counts as kept if it is a parameter of a network among the parts, or if the state of a part that is
        neither network nor optimizer has an equal tensor.
        """
        networks = [part for part in self._parts.values() if isinstance(part, nn.Module)]
        found = {*map(id, chain.from_iterable(network.parameters() for network in networks))}
        others = [part for part in self._parts.values() if not isinstance(part, (nn.Module, Optimizer))]
        missing = [weight for weight in list_weights([optimizer]) if id(weight) not in found]
        states = [part.state_dict() for part in others] if missing else []
        saved = [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]
        for weight in missing:
            if not any(leaf.shape == weight.shape and torch.equal(leaf.to(weight), weight) for leaf in saved):
                raise InputError(
                    f"loop.keep must have all that the {type(optimizer).__name__} changes: a weight of shape "
                    f"{tuple(weight.shape)} is in nothing that it was given, and a resume would begin with its first "
                    "value: give it the module that has it, as in loop.keep(model=model, loss=loss_module)"
                )


def _saved(optimizer: Optimizer) -> set[Any]:
    """Return what the optimizer's state_dict has: the numbers of options, and a digest of each tensor."""
    state = optimizer.state_dict()
    options = [{name: value for name, value in group.items() if name != "params"} for group in state["param_groups"]]
    beside = {name: value for name, value in state.items() if name != "state"}
    return {*_values({**beside, "param_groups": options}), *_values(state, only_tensors=True)}


def _held(part: Any) -> list[Any]:
    """Return the values of an object's attributes, and of lists and dicts there; empty if it has no attributes."""
    return pytree.tree_leaves([*vars(part).values()]) if hasattr(part, "__dict__") else []


def _values(tree: Any, only_tensors: bool = False) -> Iterator[Any]:
    """Yield a digest of each tensor in nested lists and dicts, and each number, unless only tensors are asked for."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield compute_sum(leaf.detach()).item()
        elif isinstance(leaf, (int, float)) and not only_tensors:
            yield leaf
