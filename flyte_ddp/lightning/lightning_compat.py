"""The private parts of Lightning that this package uses, as of version 2.6: see tests/lightning/test_ranks.py."""

import builtins
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.call import _call_callbacks_on_load_checkpoint, _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from flyte_ddp.engine.torch_compat import last_layers_first, settle_buckets


def settle_strategy_buckets(strategy: Strategy) -> None:
    """Make a DDP strategy fix the buckets of gradients when it wraps the network.

    With fixed buckets, a resumed training ends with the same bits as an undisturbed one. Other strategies are left
    alone.

    Args:
        strategy: the trainer's strategy; its _setup_model is replaced.
    """
    if not isinstance(strategy, DDPStrategy):
        return
    # DistributedDataParallel would choose new buckets after each attempt's first step, and add up in another order
    replicate = strategy._setup_model

    def replicated(model: nn.Module) -> DistributedDataParallel:
        with last_layers_first(model):
            wrapped = replicate(model)
        settle_buckets(wrapped)
        return wrapped

    strategy._setup_model = replicated  # type: ignore[method-assign]


def _call_before(owner: Any, method: str, call: Callable[[], None]) -> None:
    """Replace a method of an object by one that calls `call`, and then does the same as before."""
    replaced = getattr(owner, method)

    def called(*arguments: Any) -> Any:
        call()
        return replaced(*arguments)

    setattr(owner, method, called)


def before_each_step(trainer: Trainer, call: Callable[[], None]) -> None:
    """Make the trainer call `call` before each training step, after all hooks of the step before.

    The function also turns off Lightning's own check for SIGTERM.
    """
    # Lightning has no such hook: callbacks' on_train_batch_end runs before the module's
    loop = trainer.fit_loop.epoch_loop
    _call_before(loop, "advance", call)
    # The check would make the host wait for the device in each step
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def before_each_validation(trainer: Trainer, call: Callable[[], None]) -> None:
    """Make the trainer call `call` before each validation during training, after all hooks of the step before.

    Call this function once for each `call`, when the training has started. Before the start, the sanity check would
    call `call`, too.

    Args:
        trainer: the trainer; the run method of its validation loop is replaced.
        call: the function. What it raises ends the training.
    """
    _call_before(trainer.fit_loop.epoch_loop.val_loop, "run", call)


def begin_with_validation(checkpoint: dict[str, Any]) -> None:
    """Change a checkpoint from just before a validation in place, so that a resume begins with the validation.

    Args:
        checkpoint: the dict that Lightning would save.
    """
    none_done = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"] = {
        "total": dict(none_done),
        "current": dict(none_done),
        "is_last_batch": False,
    }


def after_train_start(trainer: Trainer, call: Callable[[], None]) -> None:
    """Make the trainer call `call` after all hooks on_train_start, and before the first epoch."""
    loop = trainer.fit_loop
    start = loop.on_run_start

    def started() -> None:
        start()
        call()

    loop.on_run_start = started  # type: ignore[method-assign]


def begin_to_read_again(trainer: Trainer) -> None:
    """Start the workers of the training loaders anew, so that they get the Dataset as it is now.

    Call this function before the first batch is read. It does nothing if all workers are persistent, if no loader has
    workers, or if a loader has load_state_dict.
    """
    # Lightning starts persistent workers once for all epochs
    loop = trainer.fit_loop
    fetcher, combined = loop._data_fetcher, loop._combined_loader
    assert fetcher
    assert combined
    loaders = combined.flattened
    has_workers = any(getattr(one, "num_workers", 0) and not one.persistent_workers for one in loaders)
    if has_workers and not any(hasattr(one, "load_state_dict") for one in loaders):
        fetched = fetcher.fetched
        iter(fetcher)
        fetcher.fetched = fetched


def before_each_epoch(trainer: Trainer, call: Callable[[], None]) -> None:
    """Make the trainer call `call` at the start of each training epoch, before the hooks of callbacks."""
    _call_before(trainer.fit_loop, "on_advance_start", call)


def call_hooks_without_epochs(trainer: Trainer) -> None:
    """Make the trainer call all hooks on_train_start and on_train_end where a resume has no epoch left to train.

    Lightning calls neither then. But on_train_end may change the weights, as callbacks that average them do.
    StochasticWeightAveraging also gets what its last epoch would have set.

    Args:
        trainer: the trainer, before its fit; the run method of its training loop is replaced.
    """
    loop = trainer.fit_loop
    run = loop.run

    def ran() -> None:
        is_done = loop.done
        run()
        if not is_done:
            return
        loop.on_run_start()  # on_train_end may need what it sets
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging) and callback._model_contains_batch_norm:
                callback._accumulate_grad_batches = trainer.accumulate_grad_batches
                loop.max_batches += 1
        loop.on_run_end()

    loop.run = ran  # type: ignore[method-assign]


def call_callbacks_on_load(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Call on_load_checkpoint of all callbacks, as Lightning does once it has loaded the module's weights."""
    _call_callbacks_on_load_checkpoint(trainer, checkpoint)


def call_module(trainer: Trainer, hook: str, *arguments: Any) -> None:
    """Call a hook of the module, which may log."""
    _call_lightning_module_hook(trainer, hook, *arguments)


def epochs_done(trainer: Trainer) -> int:
    """Return the number of epochs whose steps are done, which at their ends is more than trainer.current_epoch."""
    return trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]


# What self.log was given, and Lightning compares with what it is given in the next step
LOGGED_WITH = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch",
    "enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip
REDUCTIONS: dict[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    **{name: getattr(builtins, name) for name in ("sum", "min", "max")},
}


def logged_in_epoch(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what this rank's training steps of the epoch have logged so far, for restore_logged().

    For a metric object, the result has its attribute's name in the module, but not its state. Metric objects that are
    no attribute of the module are left out, and so are values logged with sync_dist_group.

    Returns:
        A dict for each logged value, with its key, how it was logged, and its sums as tensors. The tensors are not
        copied.
    """
    results = trainer.fit_loop.epoch_loop._results
    modules = dict(trainer.lightning_module.named_modules(remove_duplicate=False))
    return [
        {
            "key": key,
            "with": {name: getattr(one.meta, name) for name in LOGGED_WITH},
            "reduction": next(name for name, call in REDUCTIONS.items() if call is one.meta.reduce_fx),
            "is_synced": one.meta.sync.should,
            "is_rank_zeros": one.meta.sync.rank_zero_only,
            "sums": metric_state(one) if one.is_tensor else None,
        }
        for key, one in results.items()
        if not one.has_reset
        and one.meta.sync.group is None  # a checkpoint cannot hold a group of ranks
        and (one.is_tensor or modules.get(one.meta.metric_attribute) is one.value)
    ]


def restore_logged(trainer: Trainer, module: LightningModule, logged: list[Mapping[str, Any]]) -> None:
    """Restore what an earlier attempt's steps of this epoch have logged, so that the next steps add to it.

    Logged numbers get their sums back. A logged metric object is only linked again: the caller restores its state.

    Args:
        trainer: the trainer, before its next step.
        module: the module, which holds the metric objects.
        logged: what logged_in_epoch() returned on this rank.
    """
    trainer._logger_connector._first_loop_iter = True  # in an epoch's first step Lightning sets what was logged to zero
    for one in logged:
        meta = _Metadata(**one["with"], reduce_fx=REDUCTIONS[one["reduction"]])
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=one["is_synced"], rank_zero_only=one["is_rank_zeros"])
        result = _ResultMetric(meta, is_tensor=one["sums"] is not None).to(module.device)
        if one["sums"] is not None:
            set_metric_state(result, one["sums"])
        elif meta.metric_attribute:
            result.value = module.get_submodule(meta.metric_attribute)
        trainer.fit_loop.epoch_loop._results[one["key"]] = result


def forget_how_it_was_logged(trainer: Trainer) -> None:
    """Clear what was logged at the start of each later epoch, so that it may be logged in another way than in this one.

    Lightning compares how something is logged with how it was logged before, also in earlier epochs. On another number
    of ranks it is logged in another way.
    """
    before_each_epoch(trainer, trainer.fit_loop.epoch_loop._results.clear)


def values_for_callbacks(trainer: Trainer) -> dict[str, Tensor]:
    """Return trainer.callback_metrics itself, as it was when Lightning last set it."""
    return trainer._logger_connector._callback_metrics


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return this rank's sums of a metric of torchmetrics, for set_metric_state().

    States that are lists, with an entry for each batch, are left out.
    """
    sums = {name: value for name, value in metric.metric_state.items() if isinstance(value, Tensor)}
    return {**sums, "_update_count": metric._update_count}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Restore the sums that metric_state() has returned."""
    for name, value in state.items():
        setattr(metric, name, value)


def set_steps_done(trainer: Trainer, steps: int) -> None:
    """Set Lightning's counts of steps so that the current epoch goes on after this many of its steps.

    Call this function at a resume within the epoch, before the first step.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for tracker in (progress.total, progress.current):
        tracker.increment_by(steps - progress.current.ready)


def shared_out_by(sampler: object) -> object:
    """Return the user's sampler that Lightning's distributed sampler wraps; None for other samplers."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def has_cycles(loaders: Any) -> bool:
    """Return whether, of several loaders, one that ends before the others begins anew within the epoch.

    Lightning does so unless it is given a CombinedLoader with another mode than "max_size_cycle".
    """
    return not isinstance(loaders, CombinedLoader) or loaders._mode == "max_size_cycle"


def checkpoint_now(trainer: Trainer) -> dict[str, Any]:
    """Return the dict that trainer.save_checkpoint would write now; a collective if one of the module's hooks is."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint
