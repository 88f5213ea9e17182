"""The audit of steps: with virtual ranks, a part of a global batch must have the same bits each time, on any rank.

Bits differ if code draws or counts by itself; if a processor computes wrongly now and then, which Meta's Llama 3 met
six times in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5); or, from the first step on, if processors are of
different kinds.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.batches.batches import Batch, TrainBatches, parts_of_rank
from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.drift import RANKS, Warn, describe_difference
from flyte_ddp.engine.hosts.places import Place, multiply_matrices
from flyte_ddp.engine.hosts.unlike import find_wrong_products, name_ranks, split_by_majority
from flyte_ddp.engine.step import Totals
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep, copied
from flyte_ddp.errors import InputError, WrongBitsError
from flyte_ddp.random_numbers import Use, derive_key

Backward = Callable[[Sequence[Batch]], None]

REPEATS = 4  # more than a processor that errs now and then can get wrong
GRADIENTS = "gradients of the same samples"
CODE = (
    f"{GRADIENTS} have other bits each time that a rank computes them: code draws from a random generator of its own, "
    "counts calls outside of a buffer, or exchanges something by torch.distributed; draw by torch.rand, randn, randint "
    "or bernoulli without a generator, count in a buffer of the network (register_buffer), and compute a part of a "
    "batch without the others"
)
PROCESSOR = (
    f"computed {GRADIENTS} wrongly, if not each time: its processor or memory has errors, unless code draws or counts "
    "now and then; take its host, or its GPU, out of service, and go on elsewhere from the last checkpoint"
)


class Cause(Enum):
    """A reason why digests differ."""

    CODE = "a rank differs from itself each time, as code does that draws, or counts, outside of torch's reach"
    PROCESSOR = "some ranks were wrong at times, or multiply wrongly, too"
    RANKS = "ranks differ from one another, and agree with themselves"


@dataclass(frozen=True)
class Verdict:
    """The judgement on digests of one part that differ.

    Attributes:
        cause: why the digests differ.
        odd: the ranks that differ; with Cause.PROCESSOR, those whose processors are to blame.
        others: the ranks that most agree with; empty where there is no majority.
        is_sure: whether the odd ranks also multiply two matrices wrongly, which no code of a user's can cause.
    """

    cause: Cause
    odd: Sequence[int]
    others: Sequence[int] = ()
    is_sure: bool = False


class Audit:
    """A check that gradients have the same bits on two ranks: both compute the same part of a global batch.

    The other rank is on another host if there is one. In the first step all ranks compute the part. The digests of the
    part's gradients are compared before the gradients are added up. The samples are sent to the other rank, so that no
    difference is about data.

    Attributes:
        train: the batches that the steps compute.
        every: the number of steps of which one is audited; see __init__.
    """

    def __init__(self, step: ExactStep, train: TrainBatches, every: int, places: Sequence[Place], warn: Warn):
        """Prepare to audit the first step and one in `every`; 0 is the first alone. All ranks call `warn`."""
        self._step = step
        self.train = train
        self.every = every
        self._places = places
        self._warn = warn
        self._rank = distributed.get_rank()
        self._device = step.module.carrier.device
        self._is_first = True

    def add_up_gradients(
        self, backward: Backward, shares: Sequence[Batch], epoch: int, step: int, call: int = 0
    ) -> Totals:
        """Add up the gradients of a step over all ranks, and audit the step if it is due; a collective.

        In an audit, several ranks compute the gradients of the same samples, and must get the same bits. The first call
        of this method is audited on all ranks. Later calls are audited on two ranks, in each step whose number, counted
        from 1 over all epochs, is a multiple of self.every. If self.every is 0, only the first call is audited, and
        ranks that differ, but get the same bits each time, cause only a warning.

        Afterwards each weight's `grad` has the sum over the global batch.

        Args:
            backward: backward(batches) runs the forward and backward passes of these batches.
            shares: this rank's parts of the global batch.
            epoch: the number of the epoch, from 0.
            step: the number of the step in the epoch, from 0.
            call: the number of this call within the step, from 0. A GAN has a call for each of its losses.

        Returns:
            The sums of measures and requests over all ranks, and the norms of the gradients.

        Raises:
            InputError: In an audit, the code gets other bits each time, or changes a weight; or in the first one, ranks
                with different hardware get different bits. All ranks raise it.
            WrongBitsError: In an audit, ranks get different bits for another reason. All ranks raise it.
        """
        is_due = self.is_due(epoch, step)
        is_first = self._is_first
        self._is_first = False
        add_up = partial(self._step.add_up_gradients, partial(backward, shares), call)
        if not is_due:
            return add_up()
        part, owner, other = choose_part(self.train, [place.host for place in self._places], epoch, step)
        ranks = {*range(len(self._places))} if is_first else {owner, other}
        compute = partial(
            self._step.compute_gradient_digest, part, partial(backward, [self._send_part(shares, part, owner)])
        )
        before = self._digest_weights()
        found = self._collect_digests(compute, ranks)
        self._refuse_moved_weights(before)
        if len({*found.values()}) > 1:
            verdict = self._judge(compute, {rank: [digest] for rank, digest in found.items()})
            if not is_first or verdict.cause is not Cause.RANKS:
                raise self._error(verdict, epoch, step)
            self._refuse_or_warn(verdict, epoch, step)
        with self._step.watching(part):
            totals = add_up()
        in_step = gather_values(int(self._step.seen.sum()))[owner]
        if in_step != found[owner]:
            # All ranks had the same bits outside of the step, so the code depends on the other parts of the batch
            if is_first and len({*found.values()}) == 1:
                raise self._error(Verdict(Cause.CODE, [owner]), epoch, step)
            raise self._error(self._judge(compute, {owner: [found[owner], in_step]}), epoch, step)
        return totals

    def is_due(self, epoch: int, step: int) -> bool:
        """Return whether add_up_gradients() would audit this step, given epoch and step from 0."""
        number = epoch * len(self.train) + step + 1
        return self._is_first or (self.every > 0 and number % self.every == 0)

    def _digest_weights(self) -> list[int]:
        """Return a digest of each weight of the network."""
        return torch.stack([compute_sum(weight.detach()) for weight in self._step.module.model.parameters()]).tolist()

    def _refuse_moved_weights(self, before: list[int]) -> None:
        """Check that no weight of any rank has changed since `before` was computed; a collective.

        Args:
            before: what _digest_weights() returned on this rank before the loss was computed.

        Raises:
            InputError: A weight has changed on some rank. All ranks raise the error, which names the weight.
        """
        names = [name for name, _ in self._step.module.model.named_parameters()]
        # Torch does not record a change by weight.data.copy_(), which only digests show
        digests = zip(before, self._digest_weights(), strict=True)
        own = next((number for number, (earlier, now) in enumerate(digests) if earlier != now), -1)
        moved = max(gather_values(own))
        if moved >= 0:
            raise InputError(
                f"with virtual_ranks the loss of a part must be computed without a change of weights, and "
                f"{names[moved]} was changed: change it after the optimizer's step, or make it a buffer by "
                "register_buffer"
            )

    def _judge(self, compute: Callable[[], Tensor], found: Mapping[int, list[int]]) -> Verdict:
        """Find out why digests of the same gradients differ, by computing these again on all ranks; a collective.

        Each rank also multiplies two matrices, to find a processor that multiplies wrongly. Each weight's `grad` is set
        to zero.

        Args:
            compute: computes the gradients of one part of the global batch, and returns their digest.
            found: the digests so far, by rank. Ranks that have not computed the part are left out.
        """
        ranks = range(len(self._places))
        again = [self._collect_digests(compute, ranks) for _ in range(REPEATS)]
        digests = {rank: [*found.get(rank, []), *(one[rank] for one in again)] for rank in ranks}
        products = gather_values(multiply_matrices(self._device)[1])
        wrong = {rank for rank in ranks if products[rank] != self._places[rank].product}  # other bits than at the start
        for odd, others in find_wrong_products(self._places, products):
            wrong.update(odd if others else ())
        return judge(digests, wrong)

    def _error(self, verdict: Verdict, epoch: int, step: int) -> Exception:
        """Return the error to raise for a verdict: InputError if code is to blame, else WrongBitsError.

        A WrongBitsError has bad_hosts only if the verdict is sure. epoch and step count from 0.
        """
        if verdict.cause is Cause.CODE:
            return InputError(f"in epoch {epoch + 1}, step {step + 1}, {CODE}")
        if verdict.cause is Cause.RANKS:
            return WrongBitsError(epoch, step, f"{self._describe(verdict)}: {RANKS}")
        bad_hosts = [self._places[rank].host for rank in verdict.odd] if verdict.is_sure else []
        reason = f"{name_ranks(verdict.odd, self._places)} {PROCESSOR}"
        return WrongBitsError(epoch, step, reason, dict.fromkeys(bad_hosts))

    def _describe(self, verdict: Verdict) -> str:
        return describe_difference(GRADIENTS, verdict.odd, verdict.others, self._places)

    def _refuse_or_warn(self, verdict: Verdict, epoch: int, step: int) -> None:
        """Raise or warn in the first step because ranks have computed different gradients of the same samples.

        If self.every is 0, there is only a warning, because processors of different kinds may compute different bits.

        Args:
            verdict: the ranks that differ; its cause is RANKS.
            epoch: the number of the epoch, from 0.
            step: the number of the step in the epoch, from 0.

        Raises:
            WrongBitsError: self.every is not 0, and the ranks that the verdict names have the same hardware.
            InputError: self.every is not 0, and the hardware of these ranks differs, so audits are impossible.
        """
        kinds = {self._places[rank].hardware for rank in (*verdict.odd, *verdict.others)}
        if self.every and len(kinds) == 1:
            raise self._error(verdict, epoch, step)
        reason = (
            f"{self._describe(verdict)}: the result depends on which of them computes what; use processors of one "
            "kind, as many threads on each, and code that reads neither rank nor host"
        )
        if self.every:
            raise InputError(f"audit_every must be 0 where processors differ, got {self.every}: {reason}")
        self._warn(epoch, step + 1, [reason])

    def _send_part(self, shares: Sequence[Batch], part: int, owner: int) -> Batch:
        """Broadcast one part of the global batch from its owner, and return a copy of the part; a collective.

        Each tensor of the copy has the owner's strides, because torch chooses kernels by strides. A tensor that the
        owner has on the CPU is copied to the CPU, any other tensor to this rank's device.

        Args:
            shares: this rank's shares of the global batch.
            part: the number of the part.
            owner: the rank that has the part among its shares.
        """
        sent: list[Any] = [None]
        if own := next((copied(one) for one in shares if one.share.part == part and self._rank == owner), None):
            is_moved = [isinstance(leaf, Tensor) and not leaf.is_cpu for leaf in pytree.tree_leaves(own.tree)]
            sent = [(replace(own, tree=pytree.tree_map_only(Tensor, Tensor.cpu, own.tree)), is_moved)]
        distributed.broadcast_object_list(sent, owner)
        batch, is_moved = sent[0]
        leaves, structure = pytree.tree_flatten(batch.tree)
        moved = [leaf.to(self._device) if moves else leaf for leaf, moves in zip(leaves, is_moved, strict=True)]
        return replace(batch, tree=pytree.tree_unflatten(moved, structure))

    def _collect_digests(self, compute: Callable[[], Tensor], ranks: Collection[int]) -> dict[int, int]:
        """Compute the digest of a part's gradients on these ranks, and return them by rank; a collective of all."""
        digests = gather_values(int(compute()) if self._rank in ranks else 0)
        return {rank: digests[rank] for rank in sorted(ranks)}


def choose_part(train: TrainBatches, hosts: Sequence[str], epoch: int, step: int) -> tuple[int, int, int]:
    """Choose a part of a global batch, and two ranks to compute it, at random and alike on all ranks.

    Args:
        train: the batches of the training.
        hosts: the host of each rank.
        epoch: the number of the epoch, from 0.
        step: the number of the step in the epoch, from 0.

    Returns:
        The number of a part that has samples, the rank that has the part in this step, and a second rank. The second
        rank is on another host if there are several hosts. With a single rank, both are that rank.
    """
    key = derive_key(Use.AUDIT, train.seed, epoch, step)
    parts = train.parts_with_samples(step)
    part = parts[key % len(parts)]
    size = len(hosts)
    owner = next(rank for rank in range(size) if part in parts_of_rank(train.virtual_ranks, rank, size))
    elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[owner]]
    others = elsewhere or [rank for rank in range(size) if rank != owner] or [owner]
    return part, owner, others[key // len(parts) % len(others)]


def judge(digests: Mapping[int, Sequence[int]], wrong_ranks: Collection[int] = ()) -> Verdict:
    """Judge why ranks have computed different digests of the same thing, and which ranks are to blame.

    Each rank has computed the digest several times. A rank is unsteady if its own digests differ. A rank is odd if its
    usual digest, which it gets more than half of the time, is not that of most ranks. The verdict is the first of these
    that applies:

    - PROCESSOR, naming the odd ranks that multiply wrongly; or if no rank is odd, the unsteady ones that do.
    - PROCESSOR, naming the only unsteady rank, if no rank is odd and this rank has a usual digest.
    - CODE, naming the unsteady ranks.
    - RANKS, naming the odd ranks and the majority, if no rank is unsteady.

    Args:
        digests: several digests of each rank, by rank.
        wrong_ranks: the ranks that have multiplied two matrices wrongly.
    """
    usual = {rank: _usual(own) for rank, own in digests.items()}
    odd, others = split_by_majority(usual)
    unsteady = [rank for rank, own in digests.items() if len({*own}) > 1]
    wrong = [rank for rank in odd or unsteady if rank in wrong_ranks]
    if wrong or (len(unsteady) == 1 and not odd and None not in usual.values()):
        return Verdict(Cause.PROCESSOR, wrong or unsteady, is_sure=bool(wrong))
    return Verdict(Cause.CODE, unsteady) if unsteady else Verdict(Cause.RANKS, odd, others)


def _usual(digests: Sequence[int]) -> int | None:
    """Return the digest that more than half of these digests equal, or None if there is no such digest."""
    digest, count = Counter(digests).most_common(1)[0]
    return digest if 2 * count > len(digests) else None
