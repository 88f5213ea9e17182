"""The reason why digests of one part of a batch differ: code that computes the part, a processor, or other ranks."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flyte_ddp.engine.hosts.unlike import minority


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


def judge(digests: Mapping[int, Sequence[int]], wrong_products: Collection[int] = ()) -> Verdict:
    """Judge why ranks have computed different digests of the same thing, several each, and which ranks are to blame.

    A rank is unsteady if its digests differ from one another. A rank is odd if the digest that it mostly has is another
    one than that of most ranks. Some ranks multiply two matrices wrongly. The Verdict has one of three causes:

    - PROCESSOR: an odd rank multiplies wrongly, or an unsteady one does where no rank is odd; or a single rank is
      unsteady, but mostly has the others' digest.
    - CODE: any other case with unsteady ranks. The verdict names these.
    - RANKS: no rank is unsteady. The verdict names the odd ranks, and the ranks that agree.
    """
    usual = {rank: _usual(own) for rank, own in digests.items()}
    odd, others = minority(usual)
    unsteady = [rank for rank, own in digests.items() if len({*own}) > 1]
    wrong = [rank for rank in odd or unsteady if rank in wrong_products]
    if wrong or (len(unsteady) == 1 and not odd and None not in usual.values()):
        return Verdict(Cause.PROCESSOR, wrong or unsteady, is_sure=bool(wrong))
    return Verdict(Cause.CODE, unsteady) if unsteady else Verdict(Cause.RANKS, odd, others)


def _usual(digests: Sequence[int]) -> int | None:
    """Return the digest that more than half of these digests equal, or None if there is no such digest."""
    digest, count = Counter(digests).most_common(1)[0]
    return digest if 2 * count > len(digests) else None
