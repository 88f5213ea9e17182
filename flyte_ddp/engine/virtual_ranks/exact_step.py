"""A training step by virtual ranks, with the same bits on any number of ranks.

A global batch is cut into parts, as many as there are virtual ranks, whatever the number of ranks. A rank computes
whole parts, one after the other, so each kernel sees the same shapes and numbers as if the part had a rank of its own.
The gradients of the parts become whole numbers (whole_numbers.py). Their measures are added up in the order of the
parts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine import collectives, torch_compat
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.step import SingleStep, Step, Totals, constants, list_gradients
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.engine.virtual_ranks.whole_numbers import Bucket, Units, group_tensors
from flyte_ddp.errors import InputError

CALLS = 16  # calls of backward in a step that have units of their own; later calls share the last ones


class ExactStep(SingleStep):
    """A step on all ranks that sends the gradients bucket by bucket while others are still computed.

    Each part has a forward and a backward pass, and finish_part() after them. The measures go with the last bucket: the
    bits of each part's in a place of its own, where the other ranks have zeros. So the measures are added up in the
    order of the parts. A weight that no part has used has no gradient, as torch does it.

    Attributes:
        repeated: how many sums were computed again, as their units were too large or too small.
        seen: (buckets,) int64, a digest of each bucket's gradients in the part that is watched; 0 if the part was
            another rank's. See watching().
    """

    def __init__(self, step: Step, virtual_ranks: int):
        super().__init__(step)
        _check_dtypes(step)
        device = step.carrier.device
        # The value and weight of each measure, by part
        self._measured = torch.zeros(virtual_ranks, 2 * len(step.names), dtype=torch.float64, device=device)
        self._requests = False, False  # this rank's requests to stop and to save
        # A whole number for each request, and two for the bits of each measure
        sizes = self._word_sizes = [2, 2 * self._measured.numel()]
        self._is_sending = False  # the rank's last part is under way
        self._next = 0  # the bucket to be sent next
        self._weights: list[list[Tensor]]  # of each bucket
        self._nodes: list[Any] = []  # what adds up each weight's gradient; torch frees it if nobody refers to it
        self._lay_out(virtual_ranks, sum(sizes))
        # The gradients of each bucket that the current backward pass has had
        self._in_part: list[set[int]] = [set() for _ in self._buckets]
        # The gradients of each bucket that any part of this rank has had
        self._used: list[set[int]] = [set() for _ in self._buckets]
        self._is_looking = False  # whether gradients are digested, and not added up
        self._exponents: list[Tensor] = []  # of the units of each call of backward in a step
        self.repeated = 0
        self._part = -1  # the part that is computed; -1 if its samples are borrowed
        self._watched = -1  # the part whose gradients are digested
        self.seen = torch.zeros(len(self._buckets), dtype=torch.int64, device=device)

    def _lay_out(self, virtual_ranks: int, more: int) -> None:
        """Make the buckets for sums of gradients, hook the weights, and broadcast rank 0's network; a collective.

        A bucket is a piece of memory for the gradients of several weights. The hooks call _arrived() for each gradient.
        All ranks get rank 0's weights and buffers.

        Args:
            virtual_ranks: the number of parts of a batch, and so of addends in each sum.
            more: how many int32 numbers the last bucket carries besides its gradients.
        """
        step = self.module
        self._weights = group_tensors(step.trainable)
        last = self._weights[-1]
        self._buckets = [Bucket(group, more if group is last else 0) for group in self._weights]
        self._units = Units(self._buckets, virtual_ranks)
        for number, group in enumerate(self._weights):
            for place, weight in enumerate(group):
                # As in DistributedDataParallel, hooks of the weight come first, whenever they were registered
                node = torch.autograd.graph.get_gradient_edge(weight).node
                node.register_hook(partial(self._arrived, number, place))
                self._nodes.append(node)
        if distributed.get_world_size() > 1:
            # Another host's processor may have computed other bits of weights and buffers
            collectives.broadcast_in_place((*step.model.parameters(), *step.model.buffers()))

    def forward(self, batch: Batch, requests: tuple[bool, bool], is_last: bool) -> Tensor:
        """Compute the loss of one of the rank's parts of the batch, and add its measures to those of the step.

        The measures of a borrowed part are not added: it is a copy of samples that belong to another part.

        Args:
            batch: the part.
            requests: whether this rank asks to stop, and whether it asks for a checkpoint. Only the requests of the
                rank's last part count.
            is_last: whether this is the rank's last part. If so, its backward pass sends the buckets of gradients to
                the other ranks, except within compute_gradient_digest().

        Returns:
            The sum over the samples of the measure to minimise, (). The caller calls backward() on it.
        """
        self._part = -1 if batch.share.borrowed else batch.share.part
        trained, measured = self.module.compute(batch)
        with torch.no_grad():
            if not batch.share.borrowed:
                self._measured[batch.share.part] += measured.sum(1)
        if is_last and not self._is_looking:
            self._requests = requests
            self._is_sending = True
            self._next = 0
        self._forget_arrivals()
        return trained

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Make each weight's gradient a view of its place in the buckets, and set the buckets to zero."""
        self._place_gradients()
        for bucket in self._buckets:
            bucket.gradients.zero_()
        self._forget_arrivals()

    def _place_gradients(self) -> None:
        for weights, bucket in zip(self._weights, self._buckets, strict=True):
            for weight, view in zip(weights, bucket.views, strict=True):
                weight.grad = view

    def parts(self, batch: Batch, most: int) -> list[Batch]:
        """Cut a share into batches of at most this many samples (0: one batch), and copy their tensors.

        A forward pass may change what it gets, and may be repeated, also by another rank.
        """
        return [copied(part) for part in batch.parts(most)]

    @torch_compat.only_deterministic()
    def add_up_gradients(self, backward: Callable[[], None], call: int = 0) -> Totals:
        """Set each weight's gradient to the sum over all parts of all ranks, the same bits on each rank; a collective.

        Gradients are rounded to whole multiples of a unit, a power of two for each block of numbers, so that their sum
        does not depend on the order. The units are chosen by the sums of the step before. If they don't fit, they are
        chosen anew and the sum is computed a second time. A weight that no part has used gets None. If a gradient is
        not finite, all gradients become NaN. The host waits for the device.

        Args:
            backward: runs the forward and backward passes of the rank's parts. It is called a second time if there are
                no units yet, as in the first step, or if they don't fit. Gradients must be 0 before (zero_grad()).
            call: the number of this call within the step, from 0. Each call has units of its own, as each loss of a GAN
                needs.

        Returns:
            The sums of measures and requests over all ranks, and the norms of the summed gradients.

        Raises:
            InputError: An operation has no deterministic version, unless the recipe has turned deterministic algorithms
                off.
        """
        call = min(call, CALLS - 1)
        is_known = call < len(self._exponents)
        if is_known:
            self._units.use(self._exponents[call])
        self._sum(backward)
        is_exact = is_known and bool(self._units.keep_bound())
        if not is_exact and self._units.refit_units():
            self.repeated += is_known
            self.zero_grad()
            self._sum(backward)
            is_exact = self._units.fit()
        for bucket in self._buckets:
            if is_exact:
                bucket.total()
            else:
                bucket.spoil()
        if is_exact:
            self._exponents[call : call + 1] = [self._units.next_exponents()]
            uses = torch.cat([bucket.uses for bucket in self._buckets]).tolist()
            for weight, count in zip(chain.from_iterable(self._weights), uses, strict=True):
                if not count:
                    weight.grad = None
        return self._totals()

    @property
    def knows_units(self) -> bool:
        """Return whether there are units for the next step, which add_up_ahead() needs."""
        return bool(self._exponents)

    @torch_compat.only_deterministic()
    def add_up_ahead(self, backward: Callable[[], None]) -> Totals:
        """Add gradients up as add_up_gradients() does, but without waiting for the device; a collective.

        Call it once in a step, and only if knows_units is True. The units for the next step are replaced, even if the
        sum is not final.

        Args:
            backward: runs the forward and backward passes of the rank's parts. It is called once.

        Returns:
            The same as add_up_gradients(). All norms are NaN if the sum is not final: the units do not fit, a gradient
            is not finite, or no part has used some weight. Then restore the earlier units, `grid`, and take the step
            again by add_up_gradients().

        Raises:
            InputError: As add_up_gradients().
        """
        self._units.use(self._exponents[0])
        self._sum(backward)
        for bucket in self._buckets:
            bucket.total()
        self._exponents = [self._units.next_exponents()]
        is_final = self._units.keep_bound() & torch.cat([bucket.uses for bucket in self._buckets]).all()
        totals = self._totals()
        return totals._replace(norms=totals.norms.where(is_final, torch.nan))

    def _totals(self) -> Totals:
        """Return the sums over all ranks of the step whose buckets have their totals."""
        asked, bits = self._buckets[-1].more.split(self._word_sizes)
        # The bits are copied, because float64 must begin at an even place
        measured = bits.clone().view(torch.float64).view_as(self._measured).sum(0)
        return Totals(measured, asked, self._norms())

    def _norms(self) -> Tensor:
        """Return the norm of each gradient that there is, (N,)."""
        return torch_compat.norms(list_gradients(self.module))

    def finish_part(self, is_last: bool) -> None:
        """Add the gradients of a part of the batch to this rank's sums, after the part's backward pass.

        - After the rank's last part, the buckets that are not sent yet are sent to the other ranks.
        - After any other part, the gradients are set to zero.
        - Within compute_gradient_digest(), the gradients are only digested, and set to zero.

        Args:
            is_last: whether this is the rank's last part in the step.
        """
        if self._is_looking:
            for number in range(len(self._buckets)):
                self._watch(number)
        elif is_last:
            self._send(len(self._buckets))  # buckets may lack a gradient, such as an unused expert's
            self._place_gradients()  # the part may have called zero_grad(), and not used a weight
            self._is_sending = False
        else:
            for number in range(len(self._buckets)):
                self._add(number)
        if self._is_looking or not is_last:
            self.zero_grad()

    def _arrived(self, number: int, place: int, *_: Any) -> None:
        """Record that a weight's gradient is complete in this backward pass, and send the buckets that are complete.

        Torch calls this as a hook, once for each weight and backward pass. Buckets are sent in their order, and only
        during the rank's last part of the batch. If a hook or an optimizer's zero_grad() has replaced the weight's
        gradient tensor, the new tensor's values are copied into the bucket.

        Args:
            number: the index of the weight's bucket.
            place: the index of the weight in that bucket.

        Raises:
            InputError: The weight's gradient came twice in one backward pass, or after its bucket was sent.
        """
        weight, view = self._weights[number][place], self._buckets[number].views[place]
        arrived = self._in_part[number]
        if place in arrived or (self._is_sending and number < self._next):
            name = next(name for name, one in self.module.model.named_parameters() if one is weight)
            raise InputError(
                f"with virtual_ranks the gradient of {name} must come once in a backward pass, and it came twice: give "
                "torch.utils.checkpoint use_reentrant=False, and call no backward() beside that of the loss"
            )
        if weight.grad is not view:
            view.zero_() if weight.grad is None else view.copy_(weight.grad)
            weight.grad = view
        arrived.add(place)
        if self._part >= 0:  # borrowed samples count for nothing, and their draws use other weights
            self._used[number].add(place)
        while self._is_sending and self._next < len(self._buckets) and self._is_complete(self._next):
            self._send(self._next + 1)

    def _forget_arrivals(self) -> None:
        for arrived in self._in_part:
            arrived.clear()

    def _is_complete(self, number: int) -> bool:
        return len(self._in_part[number]) == len(self._weights[number])

    def _send(self, end: int) -> None:
        """Add this part's gradients to the sums of buckets, and start all-reduces of these buckets.

        They are the buckets from self._next to `end`, exclusive. The method does not wait for the all-reduces. Each
        bucket also carries what _fill_in() writes.

        Args:
            end: the index of the first bucket that is not sent; self._next is set to it.
        """
        for number in range(self._next, end):
            self._add(number)
            self._fill_in(number)
            self._buckets[number].send()
        self._next = end

    def _fill_in(self, number: int) -> None:
        """Write what travels with a bucket besides its gradients, before the bucket is sent.

        Each bucket carries a 1 for each of its weights that a part of this rank has used, and a 0 for the others. The
        last bucket also carries this rank's requests to stop and to save, the bits of its parts' measures, and numbers
        that say whether the gradients fit their units (Units.write_words).

        Args:
            number: the bucket's index.
        """
        bucket = self._buckets[number]
        used = self._used[number]
        uses = tuple(float(place in used) for place in range(len(bucket.uses)))
        bucket.uses.copy_(constants(uses, bucket.device))
        if number == len(self._buckets) - 1:
            asked, bits = bucket.more.split(self._word_sizes)
            asked.copy_(constants(tuple(map(float, self._requests)), bucket.device))
            bits.copy_(self._measured.view(-1).view(torch.int32))
            self._units.write_words()

    def _add(self, number: int) -> None:
        self._watch(number)
        self._buckets[number].add()

    def _watch(self, number: int) -> None:
        """Store a digest of a bucket's gradients in `seen`, if the current part is watched.

        Call it before Bucket.add(), which rounds the gradients.
        """
        if self._part == self._watched >= 0:
            self.seen[number] = compute_sum(self._buckets[number].gradients) * (2 * number + 1)

    @contextmanager
    def watching(self, part: int) -> Iterator[None]:
        """Store a digest of each bucket's gradients in `seen` when one part of the batch is computed in the block.

        Use this as a context manager. `seen` is set to 0 at the beginning, and stays 0 on ranks that don't compute the
        part. If the part is computed twice, the second digests stay.

        Args:
            part: the number of the part among all parts of the batch.
        """
        self.seen.zero_()
        self._watched = part
        try:
            yield
        finally:
            self._watched = -1

    @torch_compat.only_deterministic()
    def compute_gradient_digest(self, part: int, backward: Callable[[], None]) -> Tensor:
        """Run backward(), and return a digest of the gradients of one part of the batch; not a collective.

        An audit calls this before the step's add_up_gradients(). The gradients and measures computed here do not count
        in the step; the gradients are set to zero.

        Args:
            part: the number of the part among all parts of the batch.
            backward: runs the forward and backward passes of one or more parts by this object, and calls finish_part()
                after each.

        Returns:
            () int64, the digest; 0 if the part is not among those that backward computes.

        Raises:
            InputError: An operation has no deterministic version, unless the recipe has turned deterministic algorithms
                off.
        """
        self._is_looking = True
        self.zero_grad()
        with self.watching(part):
            backward()
        return self.seen.sum()

    def _sum(self, backward: Callable[[], None]) -> None:
        """Run backward() for the rank's parts, and wait for the buckets' sums over all ranks; a collective.

        The buckets then hold the sums as int32 numbers, not yet as gradients. Measures and sums of an earlier call are
        dropped. The gradients must be zero at the beginning.
        """
        self._is_looking = False
        self._measured.zero_()
        for bucket, used in zip(self._buckets, self._used, strict=True):
            bucket.start()
            used.clear()
        backward()
        for bucket in self._buckets:
            bucket.receive()

    @property
    def grid(self) -> Tensor | None:
        """The exponents of the next step's units, for a checkpoint: (calls in a step, blocks, 1) int32.

        None before the first step.
        """
        return torch.stack(self._exponents) if self._exponents else None

    @grid.setter
    def grid(self, exponents: Tensor | None) -> None:
        """Set the exponents of the next step's units, such as those of a checkpoint.

        A unit is the power of two that the gradients of a block are rounded to multiples of. If the exponents are None,
        or of another network, the next step finds units by computing twice.

        Args:
            exponents: (calls in a step, blocks, 1) int32, on any device; or None.
        """
        own = self._units.exponents
        is_fit = exponents is not None and exponents.shape[1:] == own.shape
        self._exponents = [*exponents.to(own.device)] if exponents is not None and is_fit else []


def _check_dtypes(step: Step) -> None:
    """Raise InputError if a weight that is trained is not float32, the type that sums are made for."""
    for name, weight in step.model.named_parameters():
        if weight.requires_grad and weight.dtype != torch.float32:
            raise InputError(
                f"with virtual_ranks the weights that are trained must be float32, and {name} is "
                f"{str(weight.dtype).removeprefix('torch.')}: call .float() on the network, or set virtual_ranks to 0"
            )


def copied(batch: Batch) -> Batch:
    """Return a batch with copies of the tensors, whose numbers lie in memory in the order of the strides, without gaps.

    Conjugate and negative views, which only mark what is to be computed, become plain numbers.
    """
    tree = pytree.tree_map_only(Tensor, lambda leaf: leaf.resolve_conj().resolve_neg().clone(), batch.tree)
    return replace(batch, tree=tree)
