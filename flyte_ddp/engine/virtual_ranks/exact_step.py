"""A training step by virtual ranks: the same bits on any number of ranks.

A global batch is cut into parts, as many as there are virtual ranks, whatever the number of ranks. A rank computes
whole parts, one after the other, so each kernel sees the same shapes and numbers as if the part had a rank of its own.
The gradients of the parts become whole numbers (whole_numbers.py); what they measure is added up in their order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, distributed

from flyte_ddp.engine import rank_0s, torch_compat
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.digest import sum_of
from flyte_ddp.engine.global_batch.ghost_batch_norm import constants
from flyte_ddp.engine.step import SingleStep, Step, Totals, gradients_of
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.engine.virtual_ranks.whole_numbers import Bucket, Digits, buckets_of


class ExactStep(SingleStep):
    """Step on all ranks; gradients are sent bucket by bucket while others are still computed.

    Before them go the statistics of batch norm, and what the parts measure, each part's in a place of its own, where
    the other ranks have zeros: so it can be added up in the order of the parts.

    Attributes:
        repeated: how many steps had numbers that did not fit.
        seen: (buckets,) int64, the digest of the gradients of the part that is watched, if it was this rank's.
    """

    def __init__(self, step: Step, virtual_ranks: int):
        super().__init__(step)
        device, running = step.carrier.device, step.mode.running
        statistics = torch.zeros(running.size if running else 0, dtype=torch.float32, device=device)
        # By part: value and weight of each measure, and the digest of what was drawn, from 1
        self._measured = torch.zeros(virtual_ranks, 2 * len(step.names) + 1, dtype=torch.float64, device=device)
        first = Bucket([statistics], Digits.wide(virtual_ranks), more=2 + self._measured.numel())
        self._buckets = [first, *buckets_of(step.trainable, Digits.of(virtual_ranks))]
        self._left = [0] * len(self._buckets)  # how many gradients of each bucket are still to come
        self._next = len(self._buckets)  # the bucket to be sent next
        self._counts = [len(bucket.views) for bucket in self._buckets]
        (self._statistics,) = first.views
        numbers = [number for number, bucket in enumerate(self._buckets) for _ in bucket.views][1:]
        for parameter, number in zip(reversed(step.trainable), numbers, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))
        self.hold_gradients()
        self._is_looking, self._has_grid = False, False
        self.repeated, self._part, self._watched = 0, -1, -1
        self.seen = torch.zeros(len(self._buckets), dtype=torch.int64, device=device)
        if distributed.get_world_size() > 1:
            # They may have other bits on another host's processor
            rank_0s.take((*step.model.parameters(), *step.model.buffers()))

    def forward(self, batch: Batch, requests: tuple[bool, bool], is_last: bool) -> Tensor:
        self._part = -1 if batch.share.borrowed else batch.share.part
        trained, measured = self.module.computed(batch)
        running, digests = self.module.mode.running, self.module.digests
        with torch.no_grad():
            if running:
                written = torch.empty_like(self._statistics)
                running.write(written)
                self._statistics += written
            if not batch.share.borrowed:
                of_part = self._measured[batch.share.part]
                of_part[:-1] += measured.sum(1)
                of_part[-1] = 1 + max(digests) if len(digests) == 1 else -1
            if is_last and not self._is_looking:
                first = self._buckets[0].more
                first[:2] = constants(tuple(map(float, requests)), first.device)
                first[2:] = self._measured.view(-1).view(torch.int64)
                self._left, self._next = list(self._counts), 0
                self._send(1)
        return trained

    def hold_gradients(self) -> None:
        """Has the parameters' gradients be where they are added up; an optimizer's zero_grad may have dropped them."""
        views = [view for bucket in self._buckets for view in bucket.views][1:]
        for parameter, view in zip(reversed(self.module.trainable), views, strict=True):
            parameter.grad = view

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keeps the gradients where they are."""
        for bucket in self._buckets:
            bucket.gradients.zero_()

    def parts(self, batch: Batch, most: int) -> list[Batch]:
        """Copies, since a forward pass may change what it is given, and may be repeated, also by another rank."""
        return [copied(part) for part in super().parts(batch, most)]

    @torch_compat.only_deterministic()
    def added_up(self, backward: Callable[[], None]) -> Totals:
        """Calls backward again if a number does not fit, and makes all NaN if one is not finite.

        The host waits for the device.
        """
        is_exact = (self._has_grid and self._sum(backward)) or (self._look(backward) and self._sum(backward))
        for bucket in self._buckets:
            if is_exact:
                bucket.total()
            else:
                bucket.gradients.fill_(torch.nan)
        more = self._buckets[0].more
        measured = more[2:].view(torch.float64).view_as(self._measured)
        drawn = measured[:, -1]
        uneven = (drawn < 0).any() | ((drawn != drawn.amax()) & (drawn != 0)).any()
        norms = torch_compat.norms(gradients_of(self.module))
        return Totals(measured[:, :-1].sum(0), self._statistics, uneven, more[:2], norms)

    def finish_part(self, is_last: bool) -> None:
        if self._is_looking:
            for number, bucket in enumerate(self._buckets):
                self._watch(number)
                bucket.look()
        elif is_last:
            self._send(len(self._buckets))  # those of which a gradient has not come, such as an unused expert's
        else:
            for number in range(len(self._buckets)):
                self._add(number)
        if self._is_looking or not is_last:
            self.zero_grad()

    def _arrived(self, number: int, _: Tensor) -> None:
        """A gradient of this bucket is complete."""
        self._left[number] -= 1
        if self._left[number] == 0 and self._next < len(self._buckets):
            following = range(self._next, len(self._buckets))
            self._send(next((number for number in following if self._left[number]), len(self._buckets)))

    def _send(self, end: int) -> None:
        """Adds and sends the buckets before this one, in the same order on all ranks."""
        for number in range(self._next, end):
            self._add(number)
            self._buckets[number].send()
        self._next = end

    def _add(self, number: int) -> None:
        self._watch(number)
        self._buckets[number].add()

    def _watch(self, number: int) -> None:
        """Has to come before the gradients become something else."""
        if number and self._part == self._watched >= 0:  # the first bucket's are not those of a part
            self.seen[number] = sum_of(self._buckets[number].gradients) * (2 * number + 1)

    @contextmanager
    def watching(self, part: int) -> Iterator[None]:
        """Of a step, in which seen is filled."""
        self.seen.zero_()
        self._watched = part
        yield
        self._watched = -1

    @torch_compat.only_deterministic()
    def digest_of(self, part: int, backward: Callable[[], None]) -> Tensor:
        """() int64: of the gradients of this part, which backward computes; they are in no sum. To be called before
        added_up."""
        self._is_looking = True
        self.zero_grad()
        with self.watching(part):
            backward()
        return self.seen.sum()

    def _sum(self, backward: Callable[[], None]) -> bool:
        """From gradients that are 0; whether the addends of all ranks fitted."""
        self._is_looking = False
        self._measured.zero_()
        for bucket in self._buckets:
            bucket.start()
        backward()
        return not torch.cat([bucket.receive() for bucket in self._buckets]).any()

    def _look(self, backward: Callable[[], None]) -> bool:
        """Lets numbers follow from the addends themselves; False if those are not finite. A collective."""
        self._is_looking = True
        self.repeated += self._has_grid
        self.zero_grad()
        for bucket in self._buckets:
            bucket.largest.zero_()
        backward()
        largest = torch.cat([bucket.largest for bucket in self._buckets]).nan_to_num_(nan=math.inf)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        if not largest.isfinite().all():
            return False
        for bucket, largest_of in zip(self._buckets, self._by_bucket(largest), strict=True):
            bucket.expect(largest_of)
        self._has_grid = True
        return True

    def _by_bucket(self, by_block: Tensor) -> Sequence[Tensor]:
        return by_block.split([len(bucket.largest) for bucket in self._buckets])

    @property
    def grid(self) -> Tensor | None:
        """(blocks, 1) int32: all that the next step's numbers depend on, besides the training itself."""
        return torch.cat([bucket.exponents for bucket in self._buckets]) if self._has_grid else None

    @grid.setter
    def grid(self, exponents: Tensor | None) -> None:
        """None, or that of a network of which others are trained, has the next step look for itself."""
        self._has_grid = exponents is not None and len(exponents) == sum(len(each.largest) for each in self._buckets)
        if exponents is not None and self._has_grid:
            for bucket, of_bucket in zip(self._buckets, self._by_bucket(exponents), strict=True):
                bucket.follow(of_bucket.to(bucket.exponents.device))


def copied(batch: Batch) -> Batch:
    """With tensors of its own, which are dense, in the order of their strides."""
    tree = pytree.tree_map_only(Tensor, lambda leaf: leaf.resolve_conj().resolve_neg().clone(), batch.tree)
    return replace(batch, tree=tree)
