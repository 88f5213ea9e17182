"""all_gather() by virtual ranks: the rows of all parts of a batch, of which a rank computes one after another.

A loss that compares samples needs the rows of all parts before the loss of the first part is known, and each part's
rows have a gradient from the losses of all parts. So a step runs the network twice, as GradCache does (Gao et al. 2021,
arXiv 2101.06983): once for the rows, and, when their gradients are known, once more for those of the weights. Rows and
gradients are added up in the order of the parts, and all ranks have all of them: the same bits on any number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.batches import Batch, parts_of_rank, rank_slice
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.seeds import generator_states, put_back_generators, seed_part
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

Measure = Callable[[Any, Batch], Tensor]  # returns the sum of what is trained, (), from a part's outputs and the part


class Seen(NamedTuple):
    """A part after its first pass.

    Attributes:
        part: the part.
        outputs: what forward has returned for it, without a graph.
        generators: the states of the random number generators after forward.
    """

    part: Batch
    outputs: Any
    generators: Any


class Gathered(NamedTuple):
    """The rows of a whole batch, the same on all ranks.

    Attributes:
        rows: (N, ...) what all_gather() returns.
        gradients: (N, ...) the gradients of the sum of all parts' losses; None in evaluation.
    """

    rows: Tensor
    gradients: Tensor | None = None

    def with_known_rows(self, part: Batch) -> Batch:
        """Return a copy of the part for which all_gather() returns the rows of the whole batch, without an exchange.

        all_gather() can be called once for the copy; a second call raises InputError. In the backward pass, the
        gradient of all_gather()'s result is ignored. The gradient of its argument is:

        - Usually that of this part's rows in this object's gradients.
        - Zero, if the part's samples are borrowed from another part.
        - None, if this object has no gradients, as in evaluation or for rows of integers.
        """
        own = slice(part.share.first, part.share.first + part.share.count)
        left = [self]

        def stand_in(local: Tensor) -> Tensor:
            if not left:
                raise InputError(
                    "with virtual_ranks all_gather() must be called once in measure(), got a second call: gather one "
                    "tensor of both, as by torch.cat"
                )
            left.clear()
            if self.gradients is None:
                return self.rows.clone()
            # Borrowed rows count for nothing: their gradient belongs to another part
            gradients = torch.zeros_like(local) if part.share.borrowed else self.gradients[own]
            gathered: Tensor = _Given.apply(local, self.rows, gradients)
            return gathered

        return replace(part, share=replace(part.share, stand_in=stand_in))


class _Given(torch.autograd.Function):
    """A function that returns known rows in place of a part's own rows, whose gradients are known, too."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: Tensor, gradients: Tensor) -> Tensor:
        ctx.save_for_backward(gradients)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients, None, None


class _Leaf(torch.autograd.Function):
    """A function that returns `leaf` in place of the rows of all parts, and passes their gradients to it alone.

    While measure() runs, `measuring` is not empty. A gradient that measure() itself takes through all_gather() is
    refused then, because it would lack what other parts do with the rows.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, measuring: list[Batch], local: Tensor) -> Tensor:
        ctx.measuring = measuring
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.measuring:
            raise InputError(
                "with virtual_ranks measure() must not take gradients through all_gather(), because other parts have a "
                "share in them: gather rows without a graph, as by detach(), or set virtual_ranks to 0"
            )
        return gradient, None, None


class _Stop(Exception):
    """The exception that all_gather() raises in the first pass, in place of a return, with the part's rows."""

    def __init__(self, local: Tensor):
        super().__init__()
        self.local = local.detach()


def _stop(local: Tensor) -> Tensor:
    raise _Stop(local)


def compute_rows(
    recipe: Recipe,
    forward: Callable[[Batch], Any],
    measure: Measure,
    parts: Sequence[Batch],
    begin: Callable[[], None] = lambda: None,
) -> tuple[list[Seen], Tensor | None]:
    """Compute the outputs of the rank's parts, and gather the rows that measure() passes to all_gather(); a collective.

    An exception ends measure() at its call of all_gather(), and is caught here. The random generators are seeded for
    each part, and stay as the last part leaves them. `recipe.share` is changed.

    Args:
        recipe: the recipe.
        forward: returns the outputs of a part.
        measure: is called with a part's outputs and the part. It gets copies, which it may change.
        parts: the rank's parts of the batch.
        begin: is called before each part, to restore the network's buffers.

    Returns:
        Two values. A Seen for each of the rank's parts: its outputs, detached, and the generators' states after
        forward. And the rows of all parts of all ranks, (N, ...), or None if measure() does not call all_gather().

    Raises:
        InputError: forward calls all_gather(): the ranks that see it raise this. Or measure() calls all_gather() for
            some parts only: all ranks raise this.
    """
    seen = list[Seen]()
    own = list[Tensor]()
    for part in parts:
        begin()
        stopping = replace(part, share=replace(part.share, stand_in=_stop))
        recipe.share = stopping.share
        seed_part(part.seed, part.share.part)
        try:
            outputs = pytree.tree_map_only(
                Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), forward(stopping)
            )
        except _Stop:
            raise InputError(
                f"{code_location(recipe, 'forward')}: with virtual_ranks all_gather() must be called in measure(), as "
                "the network is computed part by part: gather what it returns"
            ) from None
        seen.append(Seen(part, outputs, generator_states()))
        try:
            measure(_clone_tensors(outputs), replace(stopping, tree=_clone_tensors(part.tree)))
        except _Stop as stop:
            own.append(stop.local)
    gathering = torch.tensor([float(len(own)), float(len(parts))], device=recipe.device)
    distributed.all_reduce(gathering)
    if 0 < gathering[0] < gathering[1]:
        raise InputError(
            f"{code_location(recipe, 'measure')}: with virtual_ranks it must call all_gather() for each part of a "
            "batch or for none: call it whatever the samples are"
        )
    if not own:
        return seen, None
    rows = own[0].new_zeros(parts[0].share.size, *own[0].shape[1:])
    for part, local in zip(parts, own, strict=True):
        if not part.share.borrowed:
            rows[part.share.first : part.share.first + part.share.count] = local
    return seen, _merge(rows)


def _clone_tensors(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def _merge(own: Tensor) -> Tensor:
    """Replace zeros by the numbers of the rank that has others there, and return the tensor; a collective."""
    distributed.all_reduce(own.view(-1).view(torch.uint8))  # sums of floats would change -0.0, sums of bytes don't
    return own


def gather_by_part(
    recipe: Recipe,
    forward: Callable[[Batch], Any],
    measure: Measure,
    parts: Sequence[Batch],
    begin: Callable[[], None],
) -> Gathered | None:
    """Compute the rows that all_gather() must return in a step, and the losses' gradients for these rows; a collective.

    The weights get no gradients. For these, the caller runs forward and measure() once more, with
    Gathered.with_known_rows(part).

    This function runs forward once for each part, then measure() up to all_gather(), and then all of measure() with the
    rows of all parts. The random generators stay as the last part leaves them. `recipe.share` is changed.

    Args:
        recipe: the recipe.
        forward: returns the outputs of a part.
        measure: is called with a part's outputs and the part, and returns the sum of the part's losses, ().
        parts: the rank's parts of the batch.
        begin: is called before each part, to restore the network's buffers.

    Returns:
        The rows of the whole batch, and the gradients of the sum of all parts' losses, the same on all ranks. There are
        no gradients if the rows are integers. None if measure() does not call all_gather().

    Raises:
        InputError: forward calls all_gather(), or measure() calls it for some parts only. Or measure() takes gradients
            through all_gather().
    """
    seen, rows = compute_rows(recipe, forward, measure, parts, begin)
    if rows is None:
        return None
    if not (rows.is_floating_point() or rows.is_complex()):
        return Gathered(rows)
    virtual_ranks = recipe.settings.virtual_ranks
    own = parts_of_rank(virtual_ranks, distributed.get_rank(), distributed.get_world_size())
    by_part = rows.new_zeros(len(own), *rows.shape)
    for part, outputs, generators in seen:
        leaf = rows.clone().requires_grad_()
        measuring = [part]
        stand_in = partial(_Leaf.apply, leaf, measuring)
        with_leaf = replace(part, share=replace(part.share, stand_in=stand_in))
        put_back_generators(generators)
        loss = measure(_clone_tensors(outputs), with_leaf)
        measuring.clear()
        if not part.share.borrowed and loss.requires_grad:
            (by_part[part.share.part - own.start],) = torch.autograd.grad(loss, leaf, materialize_grads=True)
    return Gathered(rows, _add_up_by_part(by_part, virtual_ranks))


def _add_up_by_part(own: Tensor, virtual_ranks: int) -> Tensor:
    """Add up numbers over all parts of the global batch, in the order of the parts; a collective.

    Each rank adds up some of the N rows over all parts, and the ranks then exchange these sums.

    Args:
        own: (parts, N, ...), the numbers of each of this rank's parts (parts_of_rank()).
        virtual_ranks: the number of parts of all ranks together.

    Returns:
        The sums, (N, ...), the same bits on all ranks and on any number of ranks.
    """
    world_size = distributed.get_world_size()
    (_, size, *shape) = own.shape
    parts = [parts_of_rank(virtual_ranks, rank, world_size) for rank in range(world_size)]
    begins = [rank_slice(0, size, some.start, virtual_ranks)[0] for some in parts]
    rows = [slice(*ends) for ends in zip(begins, [*begins[1:], size], strict=True)]
    sent = [own[:, some].flatten() for some in rows]
    ours = rows[distributed.get_rank()]
    each = own[0, ours].numel()
    received = own.new_empty(virtual_ranks * each)
    lengths = [len(some) * each for some in parts]
    distributed.all_to_all_single(received, torch.cat(sent), lengths, [len(one) for one in sent])
    sums = own.new_zeros(size, *shape)
    for of_part in received.view(virtual_ranks, -1, *shape):  # adding in the order of the parts rounds the same
        sums[ours] += of_part
    return _merge(sums)
