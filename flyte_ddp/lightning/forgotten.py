"""The state of callbacks that Lightning's checkpoints lack."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
)

from flyte_ddp.errors import InputError

# Which Lightning does not call at the start of an epoch that a resume goes on with, and which may be called again
SETTING_UP_EPOCHS = GradientAccumulationScheduler, StochasticWeightAveraging
ANEW = (
    "it searches anew when a killed training goes on, and Lightning then forgets the epoch and the optimizer of the "
    "checkpoint; search once, by Lightning's Tuner, and give what it finds as a setting"
)
# Why no training with such a callback could go on from its checkpoint, and what to do instead
REFUSED: dict[type[Callback], str] = {
    ModelPruning: "its masks are not in Lightning's checkpoints, and no training could go on from them; prune what has "
    "been trained",
    LearningRateFinder: ANEW,
    BatchSizeFinder: ANEW,
    SpikeDetection: "Lightning cannot load its state from a checkpoint; a loss that is not finite ends a training here",
}


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise InputError for a callback with which no training could go on."""
    for kind, reason in REFUSED.items():
        if any(isinstance(one, kind) for one in callbacks):
            raise InputError(f"the callbacks must not have a {kind.__name__}: {reason}")


def forgotten(trainer: Trainer) -> dict[str, Any]:
    """Return whether a callback has ended the training, and what callbacks have frozen or unfrozen."""
    switches = _switches(trainer.lightning_module)
    frozen = {name: getattr(owner, attribute) for name, (owner, attribute) in switches.items()}
    return {"stops_early": trainer.should_stop, "frozen": frozen}


def remember(trainer: Trainer, saved: dict[str, Any], is_within_epoch: bool) -> None:
    """Restore what callbacks had done before the checkpoint.

    Args:
        saved: what `forgotten` has returned.
        is_within_epoch: whether the training goes on within an epoch.
    """
    trainer.should_stop |= saved["stops_early"]
    for name, (owner, attribute) in _switches(trainer.lightning_module).items():  # BackboneFinetuning unfreezes once
        setattr(owner, attribute, saved["frozen"][name])
    for callback in trainer.callbacks if is_within_epoch else ():  # type: ignore[attr-defined]
        if isinstance(callback, SETTING_UP_EPOCHS):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _switches(module: LightningModule) -> dict[str, tuple[Any, str]]:
    """Return what callbacks such as BackboneFinetuning freeze: by name the object, and the name of its attribute."""
    layers = {name: one for name, one in module.named_modules() if hasattr(one, "track_running_stats")}
    return {
        **{name: (weight, "requires_grad") for name, weight in module.named_parameters()},
        **{name: (one, "track_running_stats") for name, one in layers.items()},
    }
