"""The private parts of Lightning that this package uses, as of version 2.6: see tests/lightning/test_ranks.py."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from flyte_ddp.engine.torch_compat import last_layers_first, settle_buckets


def settle_strategy_buckets(strategy: Strategy) -> None:
    """Make a DDP strategy fix the gradient buckets when it wraps the network, as SettledBuckets does.

    A resumed training then ends with the same bits. Other strategies are left alone.

    Args:
        strategy: the trainer's strategy; its _setup_model is replaced.
    """
    if not isinstance(strategy, DDPStrategy):
        return
    replicate = strategy._setup_model

    def replicated(model: nn.Module) -> DistributedDataParallel:
        with last_layers_first(model):
            wrapped = replicate(model)
        settle_buckets(wrapped)
        return wrapped

    strategy._setup_model = replicated  # type: ignore[method-assign]


def around_each_step(trainer: Trainer, begin: Callable[[], None], end: Callable[[], None] = lambda: None) -> None:
    """Call one function before each training step, and another after it.

    The second call comes after everything that belongs to the step. Lightning has no hook there: on_train_batch_end of
    the module comes after those of callbacks. Lightning's own check for SIGTERM is turned off, because the host waits
    for it in each step.

    Args:
        trainer: the trainer.
        begin: called before each step.
        end: called after each step.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def advanced(data_fetcher: Any) -> None:
        begin()
        advance(data_fetcher)
        end()

    loop.advance = advanced  # type: ignore[method-assign]
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def before_each_epoch(trainer: Trainer, call: Callable[[], None]) -> None:
    """Call a function before the hooks of callbacks at an epoch's start."""
    loop = trainer.fit_loop
    start = loop.on_advance_start

    def started() -> None:
        call()
        start()

    loop.on_advance_start = started  # type: ignore[method-assign]


def call_module(trainer: Trainer, hook: str) -> None:
    """Call a hook of the module, which may log."""
    _call_lightning_module_hook(trainer, hook)


def epochs_done(trainer: Trainer) -> int:
    """Return the number of epochs whose steps are done, which at their ends is more than trainer.current_epoch."""
    return trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]


def logged_in_epoch(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Return the sums of what training steps have logged in the epoch, by key: a value, and for a mean its weight."""
    results = trainer.fit_loop.epoch_loop._results
    return {key: _sums(one) for key, one in results.items() if one.is_tensor and one.meta.on_epoch}


def _sums(result: Any) -> list[Tensor]:
    return [result.value, result.cumulated_batch_size] if result.meta.is_mean_reduction else [result.value]


def add_to_logged(trainer: Trainer, sums: dict[str, list[Tensor]]) -> None:
    """Add sums of earlier steps to those that Lightning has begun since, and take them out of the dict.

    Lightning makes a sum when something is logged for the first time. Two numbers have the same sum in either order.
    """
    results = trainer.fit_loop.epoch_loop._results
    for key in sums.keys() & results.keys():
        result, (value, *weight) = results[key], sums.pop(key)
        if result.meta.is_mean_reduction or result.meta.is_sum_reduction:
            result.value = result.value + value
        else:
            result.value = result.meta.reduce_fx(result.value, value)
        if weight:
            result.cumulated_batch_size = result.cumulated_batch_size + weight[0]


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return the sums of a metric of torchmetrics; a list of what all samples have is left out."""
    sums = {name: value for name, value in metric.metric_state.items() if isinstance(value, Tensor)}
    return {**sums, "_update_count": metric._update_count}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Restore the sums of a metric."""
    for name, value in state.items():
        setattr(metric, name, value)


def set_steps_done(trainer: Trainer, steps: int) -> None:
    """Let the current epoch go on after this many of its steps, when a training resumes within the epoch.

    Args:
        trainer: the trainer.
        steps: how many steps of the epoch are done.
    """
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
    """Return what trainer.save_checkpoint would write; a collective if one of the module's hooks is."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint
