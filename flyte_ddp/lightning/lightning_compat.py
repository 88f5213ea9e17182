"""The private parts of Lightning that this package uses, as of version 2.6: see tests/lightning/test_ranks.py."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.engine.torch_compat import last_layers_first, settle_buckets


def settle_buckets_of(strategy: Strategy) -> None:
    """Has it replicate the network as SettledBuckets does, so that a resumed training ends with the same bits."""
    if not isinstance(strategy, DDPStrategy):
        return
    replicate = strategy._setup_model

    def replicated(model: nn.Module) -> DistributedDataParallel:
        with last_layers_first(model):
            wrapped = replicate(model)
        settle_buckets(wrapped)
        return wrapped

    strategy._setup_model = replicated  # type: ignore[method-assign]


def before_each_step(trainer: Trainer, call: Callable[[], None]) -> None:
    """Have each training step begin with a call, once all that belongs to the last step is done.

    Lightning has no hook there: its last one, on_train_batch_end of the module, comes after those of callbacks. Its own
    look for a SIGTERM, for which the host waits in each step, is left out.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def advanced(data_fetcher: Any) -> None:
        call()
        advance(data_fetcher)

    loop.advance = advanced  # type: ignore[method-assign]
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def epochs_done(trainer: Trainer) -> int:
    """Return the number of epochs whose steps are done, which at their ends is more than trainer.current_epoch."""
    return trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]


def set_steps_done(trainer: Trainer, steps: int) -> None:
    """Have the epoch, within which a training goes on, go on after so many of its steps."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for tracker in (progress.total, progress.current):
        tracker.increment_by(steps - progress.current.ready)


def shared_out_by(sampler: object) -> object:
    """Return the sampler that Lightning's sampler shares out among the ranks; None for others."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def has_cycles(loaders: Any) -> bool:
    """Return whether a loader begins anew where its batches end before those of others."""
    return not isinstance(loaders, CombinedLoader) or loaders._mode == "max_size_cycle"


def checkpoint_now(trainer: Trainer) -> dict[str, Any]:
    """What trainer.save_checkpoint would write, which has no form without a file; a collective, if one of the module's
    hooks is."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint
