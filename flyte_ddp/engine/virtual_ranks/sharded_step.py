"""A training step by virtual ranks whose network is sharded: the bits of ExactStep, of which each rank has its rows.

The network's units add up their gradients by themselves, part by part (sharding.py). Here they send whole numbers, of
the same units as without sharding. The sums of a rank's rows lie in the memory of its gradients, and become gradients
after the step's last part.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.sharding.mesh import copies, counterparts, sharers
from flyte_ddp.engine.sharding.sharded_state import cut_rows
from flyte_ddp.engine.sharding.sharding import OFF, is_sharded, local
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.engine.virtual_ranks.whole_numbers import (
    BLOCK,
    BYTES,
    Units,
    block_shape,
    group_tensors,
    lay_out,
)
from flyte_ddp.errors import InputError

Owned = list[tuple[int, Tensor]]  # numbers of weights, and these


class ShardedExactStep(ExactStep):
    """A step on all ranks of a sharded network, with the bits of ExactStep."""

    def _lay_out(self, virtual_ranks: int, more: int) -> None:
        self._sums = Sums(self.module.model, self.module.trainable, more)
        buckets: list[Any] = [self._sums]
        self._buckets = buckets
        self._units = Units(buckets, virtual_ranks)
        self._weights = [self._sums.weights]
        places = {weight: place for place, weight in enumerate(self._sums.weights)}
        for unit, weights in self._sums.trained.items():
            # A gradient of 0 stands for none in the sums
            torch_compat.hook_whole_gradients(unit, partial(self._use, [places[weight] for weight in weights]))

    def _use(self, places: list[int], number: int) -> None:
        """Record that a part has used one of a unit's weights, whose places among all weights are given."""
        if self._sums.is_counted:
            self._used[0].add(places[number])

    def forward(self, batch: Batch, requests: tuple[bool, bool], is_last: bool) -> Tensor:
        self._sums.begin_part(not batch.share.borrowed, is_last)
        return super().forward(batch, requests, is_last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of this rank's rows."""
        self._forget_gradients()
        self._sums.free()

    def _forget_gradients(self) -> None:
        for weight in self.module.trainable:
            weight.grad = None

    def finish_part(self, is_last: bool) -> None:
        """Send all that the ranks add up besides the gradients, after the rank's last part."""
        if is_last:
            self._fill_in(0)
            self._sums.send()
        else:
            self._forget_gradients()  # torch would add the next part's to them, but they are the memory of the sums

    def _norms(self) -> Tensor:
        """Return the norm of each whole gradient, (N,) float32, on all ranks; a collective.

        The N norms are in the order of the trained weights that have a gradient.
        """
        # Each gradient is put together on one rank, because norms of the single rows would be rounded in another way
        weights = [weight for weight in self.module.trainable if weight.grad is not None]
        norms = torch.zeros(len(weights), dtype=torch.float32, device=self._sums.device)
        group = sharers()
        for owned in _assign_owners(weights, group.size()):
            for number, whole in self._sums.exchange_gradients(owned, group):
                norms[number] = torch_compat.norms([whole])[0]
        distributed.all_reduce(norms, group=group)
        return norms


def _assign_owners(weights: Sequence[Tensor], ranks: int) -> Iterator[list[Owned]]:
    """Assign each weight to one rank, its owner, and yield the assignments in rounds of limited size.

    The owner is the rank with the fewest bytes in the round. In a round, each rank owns at most BYTES (25 MiB), or a
    single larger weight.

    Args:
        weights: the weights.
        ranks: the number of ranks.

    Yields:
        For each round, a list with an entry for each rank: the pairs (index in `weights`, weight) that the rank owns.
            An entry may be empty.
    """
    owned: list[Owned] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number, weight in enumerate(weights):
        least = loads.index(min(loads))
        if loads[least] and loads[least] + 4 * weight.numel() > BYTES:
            yield owned
            owned = [[] for _ in range(ranks)]
            loads = [0] * ranks
            least = 0
        owned[least].append((number, weight))
        loads[least] += 4 * weight.numel()
    yield owned


class Sums:
    """The sums of a sharded network's gradients, as whole numbers; a Bucket for Units, with the blocks of all weights.

    Attributes:
        weights: the trained weights, in the order of the buckets of a network that is not sharded.
        trained: the trained weights of each unit that has some, in the order in which it sends their gradients.
        is_counted: whether the current part counts; one that only keeps this rank in step with others doesn't.
        is_last: whether the current part is the last of the step.
        blocks, scales, largest, words, uses, more: as those of a Bucket. `largest` has all rows on each rank.
    """

    def __init__(self, model: nn.Module, trainable: Sequence[nn.Parameter], more: int):
        groups = group_tensors(trainable)
        self.device = local(trainable[0]).device
        self.weights: list[Any] = [*chain.from_iterable(groups)]
        self.blocks = list[int]()
        ordered = list[Tensor]()
        self._starts: dict[Tensor, int] = {}
        for group in groups:
            places = lay_out(group)
            self.blocks += places.blocks
            ordered += [group[number] for number in places.order]
            self._starts.update(zip(group, places.starts, strict=True))
        self.scales, self.largest = torch.zeros(2, sum(self.blocks), 1, dtype=torch.float32, device=self.device)
        split = zip(ordered, self.scales.split(self.blocks), self.largest.split(self.blocks), strict=True)
        views = {weight: each for weight, *each in split}
        self.is_counted = self.is_last = False
        self._more = more
        units: dict[str, Any] = {name: unit for name, unit in model.named_modules() if is_sharded(unit)}
        self.trained = {unit: torch_compat.trained_weights(unit) for unit in units.values()}
        self._units = []
        for name, unit in units.items():
            torch_compat.use_backward_hooks(unit)
            if self.trained[unit]:
                rows = [Rows(weight, *views.get(weight, (self.scales[:0],) * 2)) for weight in self.trained[unit]]
                self._units.append(UnitSum(self, name or "the network", rows))
                unit.set_custom_reduce_scatter(self._units[-1])
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # those of experts, for example
        self.allocate(0)

    def allocate(self, words: int) -> None:
        sizes = [words, len(self.weights), self._more]
        self._sent = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        self.words, self.uses, self.more = self._sent.split(sizes)

    def begin_part(self, is_counted: bool, is_last: bool) -> None:
        self.is_counted = is_counted
        self.is_last = is_last
        for unit in self._units:
            unit.is_added = False

    def free(self) -> None:
        """Free the memory of the sums, once no gradient lies in it."""
        for unit in self._units:
            unit.memory = None

    def start(self) -> None:
        self.largest.zero_()

    def send(self) -> None:
        self._work: Any = distributed.all_reduce(self._sent, async_op=True)

    def receive(self) -> None:
        self._work.wait()

    def total(self) -> None:
        """Make gradients of the sums, and set `largest` to the largest values of all ranks' rows; a collective."""
        self.largest.zero_()
        for unit in self._units:
            unit.total()
        distributed.all_reduce(self.largest, distributed.ReduceOp.MAX, group=sharers())

    def spoil(self) -> None:
        for unit in self._units:
            if unit.memory is not None:
                unit.memory.fill_(torch.nan)

    def exchange_gradients(self, owned: list[Owned], group: Any) -> Iterator[tuple[int, Tensor]]:
        """Exchange rows of gradients, and yield the whole gradients that this rank owns; a collective.

        All ranks of the group have to iterate over the result, also those that own nothing: the exchange happens when
        the iteration begins.

        Args:
            owned: for each rank of the group, the pairs (number, weight) that it owns; alike on all ranks.
            group: the ranks that share the rows of each weight.

        Yields:
            For each weight that this rank owns, (number, the whole gradient, float32 in the weight's shape).
        """
        own = owned[group.rank()]
        ranks = range(group.size())
        sent = [[local(weight.grad).reshape(-1) for _, weight in some] for some in owned]  # type: ignore[arg-type]
        lengths = [[_count_numbers(weight, rank, len(ranks)) for _, weight in own] for rank in ranks]
        received = torch.empty(sum(map(sum, lengths)), dtype=torch.float32, device=self.device)
        distributed.all_to_all_single(
            received,
            torch.cat([received[:0], *chain.from_iterable(sent)]),
            [sum(some) for some in lengths],
            [sum(map(len, some)) for some in sent],
            group=group,
        )
        pieces = received.split([*chain.from_iterable(lengths)])
        for place, (number, weight) in enumerate(own):
            # A GPU's kernels add in another order where numbers begin at another multiple of 16 bytes
            start = self._starts[weight] % BLOCK
            room = torch.empty(start + weight.numel(), dtype=torch.float32, device=self.device)
            whole = room[start:]
            torch.cat(pieces[place :: len(own)], out=whole)
            yield number, whole.view(weight.shape)


def _count_numbers(weight: Tensor, rank: int, ranks: int) -> int:
    """Return how many numbers of a weight a rank of those that share its rows has."""
    first, last = cut_rows(len(weight), rank, ranks)
    return (last - first) * math.prod(weight.shape[1:])


class Rows:
    """A weight among those of a unit, whose gradients torch cuts into as many parts of rows as there are ranks.

    Attributes:
        length: how many numbers a part has, those included that fill up the last ones.
    """

    def __init__(self, weight: Tensor, scales: Tensor, largest: Tensor):
        """Describe the weight.

        Args:
            weight: the sharded weight.
            scales: (blocks, 1), 1 / unit of the weight's blocks; Units changes it in place.
            largest: (blocks, 1), to be kept up to date.
        """
        group = sharers()
        self._ranks = group.size()
        self._count = len(weight)
        self._shape = -(-self._count // self._ranks), math.prod(weight.shape[1:])  # of a part
        self._own = cut_rows(self._count, group.rank(), self._ranks)
        self._rank = group.rank()
        self._blocks, width = block_shape(weight)
        self._is_by_row = weight.numel() > 0 and width == self._shape[1]
        self._scales = scales
        self._largest = largest
        self.length = math.prod(self._shape)

    def scale(self, numbers: Tensor) -> None:
        """Update `largest` by a part's gradients, (ranks, length) float32, and scale these in place."""
        rows = numbers.view(self._ranks, *self._shape)
        torch.maximum(self._largest, self._measure(rows), out=self._largest)
        rows.mul_(self._factors())

    def total(self, numbers: Tensor) -> None:
        """Turn this rank's rows of a sum into gradients, in place, by the scales (1 / unit).

        `largest` gets the largest absolute values of the gradients, in the blocks that this rank has rows of.

        Args:
            numbers: (length,) float32, whole numbers before the call, and gradients afterwards.
        """
        rows = numbers.view(self._shape)
        rows.div_(self._factors()[self._rank])
        first, last = self._own
        if self._is_by_row:
            self._largest[first:last] = _largest_by_row(rows[: last - first]).unsqueeze(1)
        else:
            whole = torch.zeros(self._count, dtype=torch.float32, device=numbers.device)
            whole[first:last] = rows[: last - first, 0]
            self._largest.copy_(self._measure(whole))

    def _measure(self, rows: Tensor) -> Tensor:
        """Return the largest absolute value of each block of the whole weight, (blocks, 1); NaN if it has a NaN."""
        if self._is_by_row:
            return _largest_by_row(rows).reshape(-1, 1)[: self._count]
        numbers = rows.abs().reshape(-1)[: self._count]
        return F.pad(numbers, (0, self._blocks * BLOCK - self._count)).view(-1, BLOCK).amax(1, keepdim=True)

    def _factors(self) -> Tensor:
        """Return the scale of each row, (ranks, rows, 1); 1 where rows are filled up."""
        by_row = self._scales if self._is_by_row else self._scales.expand(-1, BLOCK).reshape(-1, 1)[: self._count]
        ranks, rows = self._ranks, self._shape[0]
        return F.pad(by_row.view(-1), (0, ranks * rows - self._count), value=1.0).view(ranks, rows, 1)


def _largest_by_row(rows: Tensor) -> Tensor:
    return torch.maximum(rows.amax(-1), rows.amin(-1).neg_())


class UnitSum:
    """The sum of one unit's gradients over all parts, which torch calls in place of its own reduce-scatter.

    Attributes:
        memory: (numbers,) float32, this rank's rows: whole numbers until total(), then the gradients. None before the
            step's first part.
        is_added: whether the current part is in it.
    """

    def __init__(self, sums: Sums, name: str, rows: list[Rows]):
        self._sums = sums
        self._name = name
        self._rows = rows
        self._lengths = [each.length for each in rows]
        self._has_sum = False
        self.memory: Tensor | None = None
        self.is_added = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of the given size for FSDP's reduce-scatter.

        Torch calls this method in place of its own allocation, in two cases:

        - For the size of this rank's rows, it gets `memory`, which is made if it is None, and otherwise keeps its
          contents.
        - For any other size, such as that of a part's gradients, it gets new, uninitialized memory.
        """
        if math.prod(size) != sum(self._lengths):
            return torch.empty(*size, dtype=dtype, device=device)
        if self.memory is None:
            self.memory = torch.empty(*size, dtype=dtype, device=device)
            self._has_sum = False
        return self.memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Add a part's gradients, as whole numbers, to this rank's rows of the sum; a collective.

        Args:
            output_tensor: what allocate() has returned for this rank's rows.
            input_tensor: (ranks * numbers,) float32, the gradients of this rank's part; useless afterwards.
            group: the ranks that share the rows.
            op: is not looked at: whole numbers are added up.
            async_op: is not looked at: torch's streams order what follows.

        Raises:
            InputError: The unit has computed twice in this part. Its gradients would be rounded twice.
        """
        if self.is_added:
            raise InputError(
                f"with virtual_ranks and sharding a unit must be called once in a forward pass, and {self._name} was "
                f"called twice: let fsdp_units name a layer that has both calls, {OFF}"
            )
        self.is_added = True
        if self._sums.is_counted:
            parts = input_tensor.view(group.size(), -1).split(self._lengths, 1)
            for rows, numbers in zip(self._rows, parts, strict=True):
                if rows.length:
                    rows.scale(numbers)
            input_tensor.round_()
        else:
            input_tensor.zero_()
        sent = _as_whole(input_tensor)
        total = output_tensor.view(torch.int32)
        if self._has_sum:
            part = torch.empty_like(total)
            distributed.reduce_scatter_single(part, sent, group=group)
            total.add_(part)
        else:
            distributed.reduce_scatter_single(total, sent, group=group)
        self._has_sum = True
        if self._sums.is_last and copies() > 1:
            distributed.all_reduce(total, group=counterparts())

    def total(self) -> None:
        """Turn the whole numbers in `memory` into gradients, in place, and record each block's largest value.

        If `memory` is None, nothing is changed.
        """
        if self.memory is None:
            return
        self.memory.copy_(self.memory.view(torch.int32))
        for rows, numbers in zip(self._rows, self.memory.split(self._lengths), strict=True):
            if rows.length:
                rows.total(numbers)


def _as_whole(numbers: Tensor) -> Tensor:
    """Turn rounded numbers, float32, into int32 in the same memory, and return them."""
    whole = numbers.view(torch.int32)
    return whole.copy_(numbers)
