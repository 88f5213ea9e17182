"""Has a module's loaders draw the same on all ranks and, after a resume, what an undisturbed training draws.

On several ranks Lightning puts its DistributedSampler in place of a RandomSampler or SequentialSampler, and deals out
what any other sampler draws.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, distributed
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from flyte_ddp.engine.digest import sum_of
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError

TRAIN, *OTHERS = "train_dataloader", "val_dataloader", "test_dataloader"


def settle_loaders(
    owner: LightningModule | LightningDataModule,
    seed: Callable[[], None],
    begin_order: Callable[[], None],
    world_size: int,
) -> None:
    """Has the methods that make loaders begin with seed(), and that of training end with begin_order(), by which it
    draws what comes next. On several ranks they raise InputError for a sampler that would be ignored."""

    def settled(method: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(method)  # Lightning asks whether the class has its own
        def call() -> Any:
            with isolate_rng():
                seed()
                loaders = method()
            if method.__name__ == TRAIN:
                begin_order()
            for loader in pytree.tree_leaves(loaders) if world_size > 1 else ():
                check_sampler(getattr(loader, "sampler", None), f"{type(owner).__name__}.{method.__name__}")
            return loaders

        return call

    for name in (TRAIN, *OTHERS):
        setattr(owner, name, settled(getattr(owner, name)))


def begin_with_epoch(trainer: Trainer, first: Callable[[], int]) -> None:
    """Has samplers begin with the first epoch, from 0: Lightning tells them only once workers have begun to read."""
    process = trainer.strategy.process_dataloader

    def processed(dataloader: object) -> object:
        loader = process(dataloader)
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            if set_epoch := getattr(getattr(owner, "sampler", None), "set_epoch", None):
                set_epoch(first())
        return loader

    trainer.strategy.process_dataloader = processed  # type: ignore[method-assign]


def check_sampler(sampler: Sampler[Any] | None, where: str) -> None:
    """Raises InputError for one that Lightning takes for a plain shuffle, or for none."""
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


def problems_of_ranks(batch: Any, world_size: int) -> list[str]:
    """Says which ranks see the same samples in a step; a collective."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    own = [int(sum_of(leaf)) for leaf in leaves if leaf.layout == torch.strided]
    sums: list[list[int]] = [[]] * world_size
    distributed.all_gather_object(sums, own)
    alike = [str(rank) for rank, of_rank in enumerate(sums) if of_rank and sums.count(of_rank) > 1]
    problem = (
        f"ranks {', '.join(alike)} see the same samples, at least in the first step: an IterableDataset has to share "
        "them out itself, by torch.distributed.get_rank() and get_world_size()"
    )
    return [problem] if alike else []
