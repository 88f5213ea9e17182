"""The check that all ranks have the same weights, which DistributedDataParallel takes for granted."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.digest import sum_of_all
from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.engine.hosts.unlike import name_ranks, split_by_majority
from flyte_ddp.errors import WrongBitsError

Warn = Callable[[int, int, Sequence[str]], None]  # of the epoch, its number of steps so far, and reasons

RANKS = (
    "code reads its rank or host, or counts calls outside of a buffer, or one of these has errors in its processor or "
    "memory, or is of another kind; if no code does, go on from the last checkpoint without one of these hosts, then "
    "without the other"
)


class Drift:
    """A comparison of the ranks' tensors before each checkpoint."""

    def __init__(self, places: Sequence[Place], device: torch.device, warn: Warn):
        """Prepare the comparisons of ranks at these places; `warn` is called on all ranks with a warning."""
        self._places = places
        self._device = device
        self._warn = warn
        self._is_told = False

    def compare(self, tensors: Iterable[Tensor], what: str, epoch: int, step: int) -> None:
        """Compare tensors between the ranks, and raise or warn if they differ; a collective.

        If the ranks' processors are of several kinds, which may round differently, there is a warning instead of an
        error, but only once: later differences are ignored.

        Args:
            tensors: the tensors to compare, in the same order on all ranks.
            what: the tensors in words, for the message.
            epoch: the number of the epoch, from 0.
            step: the number in the epoch, from 0, of the last step that was done; -1 before the epoch's first.

        Raises:
            WrongBitsError: The tensors differ although all ranks have one kind of processor. All ranks raise it.
        """
        digests = gather_values(int(sum_of_all(tensors, self._device)))
        if len({*digests}) == 1 or self._is_told:
            return
        reason = describe_difference(what, *split_by_majority(dict(enumerate(digests))), self._places)
        if len({place.hardware for place in self._places}) == 1:
            raise WrongBitsError(epoch, step, f"{reason}: {RANKS}")
        self._is_told = True
        self._warn(epoch, step + 1, [f"{reason}: use processors of one kind, so that all ranks train the same network"])


def describe_difference(what: str, odd: Sequence[int], others: Sequence[int], places: Sequence[Place]) -> str:
    """Return a clause for messages that names the ranks whose tensors have other bits.

    Args:
        what: the tensors in words, such as "the weights".
        odd: the ranks that differ from the majority; without a majority, all ranks.
        others: the ranks of the majority, of which the clause names the first; empty without a majority.
        places: the host and device of each rank.
    """
    if others:
        return f"{what} have other bits on {name_ranks(odd, places)} than on {name_ranks(others[:1], places)}"
    return f"{what} have other bits on each of {name_ranks(odd, places)}"
