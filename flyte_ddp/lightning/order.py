"""The order in which a DataLoader reads, which can begin in the middle of an epoch."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset

from flyte_ddp.engine.batches.sample_seeds import SeededIndices, generators_restored, seed_generators
from flyte_ddp.engine.checks.held_generators import find_held_generators
from flyte_ddp.engine.torch_compat import batch_order
from flyte_ddp.errors import InputError
from flyte_ddp.lightning.lightning_compat import shared_out_by
from flyte_ddp.random_numbers import Use, derive_key

END = object()
DRAW_FIRST = ("torch.", "lightning.")  # packages whose samplers draw the order of an epoch before its first batch
OWN = re.compile(r"self\.(?!generator\.manual_seed)\w+( = |\.(manual_)?seed\()")


def can_skip(loader: object) -> bool:
    """Return whether a loader can begin in the middle of an epoch, once an Order replaces its batch sampler.

    It can if it is a DataLoader whose class does not override __iter__, if it has no load_state_dict, and if its
    dataset is not an IterableDataset.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False  # a class with an __iter__ of its own may read in an order of its own
    return not (hasattr(loader, "load_state_dict") or isinstance(loader.dataset, IterableDataset))


class Order:
    """An iterable that takes the place of a loader's batch sampler, and can begin in the middle of an epoch.

    Iterating yields what the batch sampler yields: the indices of each batch. The sampler draws from generators that
    are seeded by the epoch. A batch is read with generators that are seeded by its place in the epoch, so it doesn't
    matter which worker reads the batch, or what that worker has read before.
    """

    def __init__(self, loader: DataLoader[Any], key: tuple[int, ...], rank: int, epoch: Callable[[], int]):
        """Take the batch sampler of a loader.

        Args:
            loader: a loader for which can_skip() returns True.
            key: the numbers that tell the loader's random numbers from those of other loaders and trainings.
            rank: this rank, as each reads its batches with random numbers of its own.
            epoch: returns the epoch, from 0, in which an iteration begins.
        """
        self._batches: Iterable[Any] = batch_order(loader)[1]
        self._key, self._rank, self._epoch = key, rank, epoch
        self._has_workers = loader.num_workers > 0
        self._generators = [(one, one.initial_seed() % 2**64) for one in _list_generators(loader)]
        self._samplers = list_samplers(loader)
        self._draws_late = any(not type(one).__module__.startswith(DRAW_FIRST) for one in self._samplers)
        self._iterated, self._pass = -1, 0  # the epoch of the last iteration, and how many it has had before
        self._first: dict[int, tuple[int, int]] = {}  # by epoch, the pass that is gone on with, and what it leaves out

    def begin_at(self, step: int, has_cycles: bool) -> None:
        """Make the next iteration of the current epoch begin after `step` steps.

        All other iterations begin at the start of their order.

        Args:
            step: how many batches training has read from this loader in this epoch.
            has_cycles: whether `step` may count several passes, because another loader is longer and this one starts
                over. The iteration then continues the pass that `step` ends in. A loader without a length is taken to
                be in its first pass.
        """
        length = sized_len(self._batches) if has_cycles else 0
        # An epoch without a step left may read nothing, and then the next one must not begin so
        self._first = {self._epoch(): divmod(step, length) if length else (0, step)}

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # A generator, as DataLoader begins two iterations where it has workers, and uses the second alone
        epoch = self._epoch()
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):  # Lightning doesn't tell batch samplers
                sampler.set_epoch(epoch)
        following = self._pass + 1 if epoch == self._iterated else 0
        self._pass, skipped = self._first.pop(epoch, (following, 0))
        self._iterated = epoch
        yield from self._read((*self._key, epoch, self._pass), skipped)

    def _read(self, key: tuple[int, ...], skipped: int) -> Iterator[Any]:
        """Yield the index batches of one pass over the samples, without the first `skipped` ones.

        The order is drawn from generators seeded with `key`. The samples of a batch are read with generators seeded
        with `key`, the batch's number and the rank.

        Args:
            key: integers to seed from: those of the training and loader, the epoch, and the number of the pass within
                it.
            skipped: how many batches are left out. The sampler still draws them, so the later ones are those of a whole
                pass.
        """
        for generator, seed in self._generators:
            generator.manual_seed(derive_key(Use.LIGHTNING_ORDER, *key, 0, seed))
        with generators_restored():
            seed_generators(derive_key(Use.LIGHTNING_ORDER, *key))
            batches = iter(self._batches)
            batch = next(batches, END)
        for number in count(1):
            if batch is END:
                return
            if number > skipped:
                yield self._seeded(batch, derive_key(Use.LIGHTNING_BATCH, *key, number, self._rank))
            if self._draws_late:
                with generators_restored():
                    seed_generators(derive_key(Use.LIGHTNING_ORDER, *key, number))
                    batch = next(batches, END)
            else:
                batch = next(batches, END)

    def _seeded(self, batch: Any, key: int) -> Any:
        """Return a batch's indices, having seeded how it is read: in a loader worker, by indices that carry the key."""
        if self._has_workers:
            return SeededIndices(batch, key)
        seed_generators(key)
        return batch


def list_samplers(loader: object) -> list[Any]:
    """Return the loader's batch sampler and sampler, each if it has one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    samplers = {id(one): one for one in (batch_sampler, inner, getattr(loader, "sampler", None)) if one is not None}
    return [*samplers.values()]


def _list_generators(loader: object) -> list[torch.Generator]:
    """Return the torch.Generators that a loader and its samplers were given as their `generator`, each once."""
    samplers = list_samplers(loader)
    found = [getattr(one, "generator", None) for one in (loader, *samplers, *map(shared_out_by, samplers))]
    return [*{id(one): one for one in found if isinstance(one, torch.Generator)}.values()]


def check_sampler_state(loader: object, where: str) -> None:
    """Raise InputError if a sampler of the loader draws from a generator that a resume could not bring back.

    Such a generator is an attribute of the sampler, other than `generator`, which Order seeds. A sampler with
    set_epoch() is not checked, because that method is expected to seed the generator.

    Args:
        loader: the loader, whose batch sampler and sampler are checked.
        where: the method that returned the loader, for the message.
    """
    for sampler in list_samplers(loader):
        if hasattr(sampler, "set_epoch"):
            continue
        # OWN leaves out generators of the sampler's dataset, and the attribute `generator`, which Order seeds
        for call in filter(OWN.match, find_held_generators(sampler)):
            raise InputError(
                f"{where}: {type(sampler).__name__} must not draw from a generator of its own, which no checkpoint "
                f"has: begin its __iter__ with {call}, or give it set_epoch(epoch), which seeds it"
            )
