"""Whether ranks compute what they should: a part of a global batch, computed by two of them, must have the same bits.

That needs virtual ranks, whose parts have the same bits on any rank. What differs is a processor that computes wrongly
now and then, which Meta's Llama 3 met six times in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5), or, from the
first step on, one of another kind.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.batches import Batch, TrainBatches, parts_of_rank
from flyte_ddp.engine.digest import sum_of_all
from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.engine.hosts.unlike import named
from flyte_ddp.engine.step import SingleStep, Totals
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep, copied
from flyte_ddp.errors import InputError, WrongBitsError
from flyte_ddp.random_numbers import Use, key_of
from flyte_ddp.text import listed

Backward = Callable[[Sequence[Batch]], None]
Warn = Callable[[int, int, Sequence[str]], None]  # of epoch, step and reasons


class Audit:
    """Has parts of global batches computed by another rank, too, on another host if there is one.

    What is compared are the digests of the part's gradients, as they are before they are added up. The samples are sent
    to the other rank, so what it finds is not about data.
    """

    def __init__(self, step: ExactStep, train: TrainBatches, every: int, places: Sequence[Place], warn: Warn):
        """every: so many steps; with 0, only the first is. places: of each rank. warn is called on all ranks."""
        self._step, self._train, self.every, self._places, self._warn = step, train, every, places, warn
        self._rank, self._device, self._is_first = distributed.get_rank(), step.module.carrier.device, True

    def added_up(self, backward: Backward, shares: Sequence[Batch], epoch: int, step: int) -> Totals:
        """As ExactStep's, of a step whose part may be audited; a collective.

        Raises WrongBitsError, on all ranks and with the weights as before the step, if two differ.
        """
        if self._is_first:
            self._is_first = False
            self._compare_processors(backward, shares, epoch, step)
        add_up = partial(self._step.added_up, partial(backward, shares))
        if not self.every or (epoch * len(self._train) + step + 1) % self.every:
            return add_up()
        part, owner, other = chosen(self._train, [place.host for place in self._places], epoch, step)
        batch = self._sent(shares, part, owner)
        digests = torch.zeros(2, dtype=torch.int64, device=self._device)
        if self._rank == other:
            digests[1] = self._step.digest_of(part, partial(backward, [batch]))
        with self._step.watching(part):
            totals = add_up()
        if self._rank == owner:
            digests[0] = self._step.seen.sum()
        distributed.all_reduce(digests)
        first, second = digests.tolist()
        if first != second:
            again = self._digests(backward, batch)
            wrong, is_known = _who_is_wrong(again, [(owner, first), (other, second)])
            raise WrongBitsError(self._named(wrong), is_known, epoch, step)
        return totals

    def compare_states(self, tensors: Iterable[Tensor], epoch: int, step: int) -> None:
        """Raises WrongBitsError, on all ranks, unless all of them have the same tensors; a collective."""
        digests = self._of_all(sum_of_all(tensors, self._device))
        if len({*digests}) > 1:
            wrong, is_known = _who_is_wrong(digests, [])
            raise WrongBitsError(self._named(wrong), is_known, epoch, step, "has other weights, or optimizer state")

    def _sent(self, shares: Sequence[Batch], part: int, owner: int) -> Batch:
        """The part of the global batch, on all ranks, with the strides that it has, by which kernels go."""
        outlines: list[Any] = [None]
        own = next((copied(one) for one in shares if one.share.part == part and self._rank == owner), None)
        if own:
            leaves = pytree.tree_leaves(own.tree)
            outline = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), own.tree)
            outlines = [(replace(own, tree=outline), [str(getattr(leaf, "device", "")) for leaf in leaves])]
        distributed.broadcast_object_list(outlines, owner)
        batch, devices = outlines[0]
        leaves, structure = pytree.tree_flatten((own or batch).tree)
        sent = [
            self._sent_leaf(leaf, device, owner) if isinstance(leaf, Tensor) else leaf
            for leaf, device in zip(leaves, devices, strict=True)
        ]
        return replace(batch, tree=pytree.tree_unflatten(sent, structure))

    def _sent_leaf(self, leaf: Tensor, device: str, owner: int) -> Tensor:
        """Of which all but the owner have a meta tensor; device: on which it is there."""
        sent = torch.empty_like(leaf, device=self._device) if leaf.is_meta else leaf.to(self._device)
        in_memory = sent.as_strided((sent.numel(),), (1,))  # a copy is dense
        distributed.broadcast(in_memory.view(torch.uint8), owner)
        return sent.to("cpu") if device == "cpu" else sent

    def _digests(self, backward: Backward, batch: Batch) -> list[int]:
        """Of the gradients that each rank computes of this part."""
        return self._of_all(self._step.digest_of(batch.share.part, partial(backward, [batch])))

    def _of_all(self, own: Tensor) -> list[int]:
        """Each rank's, by rank."""
        digests = torch.zeros(len(self._places), dtype=torch.int64, device=self._device)
        digests[self._rank] = own
        distributed.all_reduce(digests)
        found: list[int] = digests.tolist()
        return found

    def _compare_processors(self, backward: Backward, shares: Sequence[Batch], epoch: int, step: int) -> None:
        part = self._train.parts_with_samples(step)[0]
        owner = owner_of(part, self._train.virtual_ranks, len(self._places))
        digests = self._digests(backward, self._sent(shares, part, owner))
        most = Counter(digests).most_common(1)[0][0]
        odd = [rank for rank, digest in enumerate(digests) if digest != most]
        if not odd:
            return
        usual = digests.index(most)
        if self.every and all(self._places[rank].hardware == self._places[usual].hardware for rank in odd):
            wrong, is_known = _who_is_wrong(digests, [])
            raise WrongBitsError(self._named(wrong), is_known, epoch, step)
        reason = (
            f"{self._named(odd)} computes other bits than {self._named([usual])}: the result depends on which of them "
            "computes what; use processors of one kind, and as many threads on each"
        )
        if self.every:
            raise InputError(f"audit_every must be 0 where processors differ, got {self.every}: {reason}")
        self._warn(epoch, step, [reason])

    def _named(self, ranks: Sequence[int]) -> str:
        """With their hosts and devices."""
        return listed([named(rank, self._places[rank]) for rank in ranks])


def audit_of(
    step: SingleStep, train: TrainBatches, every: int, places: Sequence[Place], reasons: Sequence[str], warn: Warn
) -> Audit | None:
    """None where no rank has the same bits as another, or none is to be compared. reasons: why the result depends on
    the ranks, with which nothing can be audited. The other arguments are Audit's."""
    if reasons and every:
        raise InputError(
            f"audit_every must be 0 for a recipe whose result depends on the number of ranks, got {every}: {reasons[0]}"
        )
    if not isinstance(step, ExactStep) or reasons or (len(places) == 1 and not every):
        return None
    return Audit(step, train, every, places, warn)


def chosen(train: TrainBatches, hosts: Sequence[str], epoch: int, step: int) -> tuple[int, int, int]:
    """A part of a global batch that has samples, the rank that computes it, and another, if there is one on another of
    the ranks' hosts; at random, and the same on all ranks."""
    key = key_of(Use.AUDIT, train.seed, epoch, step)
    parts = train.parts_with_samples(step)
    part = parts[key % len(parts)]
    owner = owner_of(part, train.virtual_ranks, len(hosts))
    elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[owner]]
    others = elsewhere or [rank for rank in range(len(hosts)) if rank != owner] or [owner]
    return part, owner, others[key // len(parts) % len(others)]


def owner_of(part: int, virtual_ranks: int, world_size: int) -> int:
    """The rank that computes this part."""
    return next(rank for rank in range(world_size) if part in parts_of_rank(virtual_ranks, rank, world_size))


def _who_is_wrong(digests: Sequence[int], before: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """The ranks with other digests than most, or than they have had before; else all, and that it is not known.

    digests: of all ranks. before: of some, what they have had before.
    """
    truth, count = Counter(digests).most_common(1)[0]
    if 2 * count > len(digests):
        wrong = {rank for rank, digest in (*enumerate(digests), *before) if digest != truth}
    else:
        wrong = {rank for rank, digest in before if digest != digests[rank]}
    return sorted(wrong) or [*range(len(digests))], bool(wrong)
