"""Loaders of a module, which draw the same orders on all ranks, and after a resume those of an undisturbed training.

On several ranks Lightning puts its DistributedSampler in place of a RandomSampler or SequentialSampler, and deals out
what any other sampler draws.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from flyte_ddp.engine.checks.held_generators import find_held_generators
from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.torch_compat import pytree, set_batch_order
from flyte_ddp.errors import InputError
from flyte_ddp.lightning.lightning_compat import begin_to_read_again, epochs_done, has_cycles, set_steps_done
from flyte_ddp.lightning.order import Order, can_skip, check_sampler_state, list_samplers

METHODS = ("train_dataloader", "val_dataloader", "test_dataloader")
TRAIN = METHODS[0]


class Loaders:
    """The changes to the DataLoaders of a module and its data by which a resume reads what is still to be read.

    adapt_methods() changes the methods that make the loaders, adapt_trainer() the trainer that processes them.

    Attributes:
        begins_epochs_anew: the reason why a resume cannot begin within an epoch; empty if it can.
        problems: warnings of what a resume would not bring back.
    """

    def __init__(self, seed: int, rank: int, world_size: int, position: Callable[[], tuple[int, int]]):
        """Change nothing yet.

        Args:
            seed: the setting seed, from which orders follow.
            rank: this rank.
            world_size: the number of ranks.
            position: returns the epoch and step, from 0, that training begins with, or goes on with.
        """
        self._seed, self._rank, self._world_size, self._position = seed, rank, world_size, position
        self._method = TRAIN  # the method that has made the latest loaders
        self._owner = ""  # the class that has the method
        self._count = 0  # how many of these loaders have got an Order
        self._has_cycles = True
        self._begun: list[tuple[Order, int, bool]] = []  # the orders of training, and where they begin
        self.begins_epochs_anew = ""
        self.problems: list[str] = []

    def adapt_methods(
        self, owner: LightningModule | LightningDataModule, seed: Callable[[], None], begin_order: Callable[[], None]
    ) -> None:
        """Wrap the owner's methods that make DataLoaders, so that all ranks make the same ones, and check the loaders.

        The methods train_dataloader, val_dataloader and test_dataloader are replaced on the object `owner`. A wrapped
        method calls `seed`, makes the loaders, and restores the global random generators. train_dataloader then calls
        `begin_order`, whose effect on the generators stays. Each loader is then checked:

        - InputError is raised for a sampler that no resume could restore. On several ranks it is also raised for a
        sampler whose choice of samples Lightning would discard.
        - A training loader that cannot continue within an epoch adds a warning to `problems`, and sets
        begins_epochs_anew.
        - A training Dataset with a random generator of its own adds a warning to `problems`.

        The method prepare_data is replaced, too, and restores the generators at its end.

        Args:
            owner: the module or its data.
            seed: seeds the global generators alike on all ranks.
            begin_order: seeds the global generators for the order of the training samples.
        """

        def settled(name: str, method: Callable[[], Any]) -> Callable[[], Any]:
            @functools.wraps(method)  # Lightning asks whether the class has its own
            def call() -> Any:
                with isolate_rng():
                    seed()
                    loaders = method()
                if name == TRAIN:
                    begin_order()
                self._method, self._owner = name, type(owner).__name__
                self._count = 0
                self._has_cycles = has_cycles(loaders)
                is_combined = isinstance(loaders, CombinedLoader)
                for loader in loaders.flattened if is_combined else pytree.tree_leaves(loaders):
                    self._check(loader)
                return loaders

            return call

        for name in METHODS:
            setattr(owner, name, settled(name, getattr(owner, name)))
        # Lightning calls prepare_data on one rank of a node, which would otherwise draw other splits in setup
        owner.prepare_data = isolate_rng()(owner.prepare_data)  # type: ignore[method-assign]

    def _check(self, loader: object) -> None:
        """Check one loader that the method self._method has just returned.

        A training loader whose position a resume cannot restore adds a warning to `problems`, and sets
        begins_epochs_anew. A training Dataset with a random generator of its own adds a warning, too.

        Args:
            loader: a DataLoader, or any other iterable that the method returned.

        Raises:
            InputError: the loader can begin within an epoch, but its sampler draws from a generator that a resume
                cannot restore; or there are several ranks, and Lightning would ignore what the sampler chooses.
        """
        where = f"{self._owner}.{self._method}"
        if self._world_size > 1:
            check_sampler(getattr(loader, "sampler", None), where)
        if can_skip(loader):
            check_sampler_state(loader, where)
        dataset = getattr(loader, "dataset", None)
        if self._method != TRAIN:
            return
        if not can_skip(loader) and not hasattr(loader, "load_state_dict"):
            what = type(loader).__name__ if dataset is None else f"{type(loader).__name__} of {type(dataset).__name__}"
            self.begins_epochs_anew = (
                f"{where} returns a {what}, which has no state, so checkpoints are saved at the ends of epochs alone, "
                "and a resume begins there: let a plain DataLoader read a Dataset with __getitem__ and __len__, or "
                "give the loader state_dict and load_state_dict"
            )
            self.problems.append(self.begins_epochs_anew)
        for call in [*find_held_generators(dataset)][:1]:
            self.problems.append(
                f"{where}: {type(dataset).__name__} has a random number generator of its own, which no checkpoint has, "
                f"so what it draws after a resume is not what an undisturbed training draws: call {call} wherever it "
                "begins to read a sample; self is the Dataset"
            )

    def adapt_trainer(self, trainer: Trainer) -> None:
        """Wrap process_dataloader of the trainer's strategy, so that loaders read in a repeatable order.

        Each loader that can skip batches gets an order of samples that follows from the seed and the epoch. If the
        training begins within an epoch, its training loader skips the batches that are done, and Lightning's counts of
        steps are set to match. Each sampler with set_epoch() is told the epoch.
        """
        process = trainer.strategy.process_dataloader

        def processed(dataloader: object) -> object:
            loader: Any = process(dataloader)
            epoch, step = self._position()
            # Lightning would tell the epoch only after the workers have begun to read
            for sampler in list_samplers(loader):
                if set_epoch := getattr(sampler, "set_epoch", None):
                    set_epoch(epoch)
            key = self._seed, METHODS.index(self._method), self._count
            self._count += 1
            if can_skip(loader):
                order = Order(loader, key, self._rank, lambda: epochs_done(trainer))
                set_batch_order(loader, order)
                if self._method == TRAIN:
                    self._begun.append((order, step, self._has_cycles))
                if self._method == TRAIN and step:
                    order.begin_at(step, self._has_cycles)
                    set_steps_done(trainer, step)
            return loader

        trainer.strategy.process_dataloader = processed  # type: ignore[method-assign]

    def begin_again(self, trainer: Trainer) -> None:
        """Read the training data by new workers, from where this attempt begins. Call it before the first batch."""
        for order, step, cycles in self._begun:
            order.begin_at(step, cycles)
        begin_to_read_again(trainer)


def check_sampler(sampler: Sampler[Any] | None, where: str) -> None:
    """Raise InputError for a sampler whose choice of samples Lightning would discard. Call this only on several ranks.

    On several ranks Lightning replaces each RandomSampler and SequentialSampler by a sampler that passes over all
    samples. So subclasses of these two are refused, and so are replacement=True and a num_samples other than the number
    of samples. The two classes with their defaults, other samplers, and None are accepted.

    Args:
        sampler: the loader's sampler, if it has one.
        where: the method that has returned the loader, for the message.
    """
    if not isinstance(sampler, (RandomSampler, SequentialSampler)):
        return
    drawn = {name: getattr(sampler, name, None) for name in ("replacement", "num_samples")}
    is_plain = not drawn["replacement"] and drawn["num_samples"] in (None, len(sampler.data_source))
    if type(sampler) not in (RandomSampler, SequentialSampler) or not is_plain:
        shown = ", ".join(f"{name}={value}" for name, value in drawn.items() if value is not None)
        raise InputError(
            f"{where} must have a sampler that is no RandomSampler or SequentialSampler, or a plain one, on several "
            f"ranks, where Lightning passes over all samples instead, got {type(sampler).__name__}({shown}): derive it "
            "from torch.utils.data.Sampler, or take WeightedRandomSampler"
        )


def warn_of_equal_batches(batch: Any) -> list[str]:
    """Return a list with one warning if some ranks have been given equal batches, else an empty list; a collective.

    All ranks return the same. Batches are equal if the checksums of their dense tensors are.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    plain = [leaf for leaf in leaves if not (leaf.is_nested or leaf.is_quantized)]
    sums = gather_values([int(compute_sum(leaf)) for leaf in plain])
    alike = [str(rank) for rank, of_rank in enumerate(sums) if of_rank and sums.count(of_rank) > 1]
    problem = (
        f"ranks {', '.join(alike)} see the same samples, at least in the first step: an IterableDataset has to share "
        "them out itself, by torch.distributed.get_rank() and get_world_size()"
    )
    return [problem] if alike else []
