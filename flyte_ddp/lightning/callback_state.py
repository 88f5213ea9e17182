"""State of callbacks that Lightning's checkpoints lack, and the hooks that begin an epoch, after a resume within it."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from flyte_ddp.engine.torch_compat import version
from flyte_ddp.errors import InputError
from flyte_ddp.lightning.lightning_compat import call_module

# Lightning's callbacks that set up an epoch, and may do so again
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


def has_hook(trainer: Trainer, *hooks: str) -> bool:
    """Return whether the module, or a callback of the user's, has a method of its own for one of these hooks."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    ours = "flyte_ddp."
    theirs = [one for one in callbacks if not (is_lightnings(one) or type(one).__module__.startswith(ours))]
    owners = [trainer.lightning_module, *theirs]
    return any(hook in vars(owner) or is_overridden(hook, owner) for owner in owners for hook in hooks)


def is_lightnings(callback: Callback) -> bool:
    """Return whether a callback is one of Lightning's. A LambdaCallback is not, because its hooks are the user's."""
    return type(callback).__module__.startswith("lightning.") and not isinstance(callback, LambdaCallback)


def callback_state(trainer: Trainer) -> dict[str, Any]:
    """Return what callbacks may have changed and Lightning's checkpoints lack, for restore_callbacks().

    Returns:
        "stops_early": whether a callback has ended the training. "frozen": a dict of flags, with requires_grad under
        the name of each weight, and track_running_stats under the name of each layer that has this attribute.
    """
    switches = _freeze_flags(trainer.lightning_module)
    frozen = {name: getattr(owner, attribute) for name, (owner, attribute) in switches.items()}
    return {"stops_early": trainer.should_stop, "frozen": frozen}


def restore_callbacks(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Freeze and unfreeze weights as callback_state() found them, and end the training if a callback had ended it."""
    trainer.should_stop |= saved["stops_early"]
    flags = _freeze_flags(trainer.lightning_module)
    for name, (owner, attribute) in flags.items():  # BackboneFinetuning unfreezes once, and not again after a resume
        setattr(owner, attribute, saved["frozen"][name])


def begin_epoch_again(trainer: Trainer, observer: Callback) -> bool:
    """Call on_train_epoch_start of the user's callbacks and of the module, after a resume within an epoch.

    Lightning does not call these hooks then. This function calls all of them except those of subclasses of
    BaseFinetuning, and of Lightning's own callbacks other than GradientAccumulationScheduler and
    StochasticWeightAveraging. After its hook, each of the user's callbacks gets back its state_dict() from before.

    Args:
        trainer: the trainer.
        observer: this library's own callback, which is not called.

    Returns:
        Whether weights, buffers, or the state or settings of optimizers have changed on this rank. If so, the caller
        restores them from the checkpoint.
    """
    module = trainer.lightning_module
    before = _versions(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SETTING_UP_EPOCHS):
            callback.on_train_epoch_start(trainer, module)
        elif not (is_lightnings(callback) or isinstance(callback, BaseFinetuning)) and callback is not observer:
            state = deepcopy(callback.state_dict())
            callback.on_train_epoch_start(trainer, module)
            callback.load_state_dict(state)
    call_module(trainer, "on_train_epoch_start")
    return _versions(trainer) != before


def _versions(trainer: Trainer) -> list[Any]:
    """Return values by which the caller can tell whether the module's tensors or the optimizers have changed.

    Two results are equal if nothing has changed between the two calls. For each parameter, buffer and tensor of an
    optimizer, the list has the tensor's id and how often it was changed in place. Other settings of optimizers, such as
    the learning rate, are copied.
    """
    module = trainer.lightning_module
    states = chain.from_iterable(one.state.values() for one in trainer.optimizers)
    values = chain.from_iterable(state.values() for state in states)
    tensors = [*module.parameters(), *module.buffers(), *(value for value in values if isinstance(value, Tensor))]
    groups = chain.from_iterable(one.param_groups for one in trainer.optimizers)
    settings = [(name, value) for group in groups for name, value in group.items() if name != "params"]
    tensors += [value for _, value in settings if isinstance(value, Tensor)]
    others = [deepcopy(pair) for pair in settings if not isinstance(pair[1], Tensor)]
    return [*((id(tensor), version(tensor)) for tensor in tensors), *others]


def _freeze_flags(module: LightningModule) -> dict[str, tuple[Any, str]]:
    """Return the attributes that callbacks such as BackboneFinetuning set to freeze something.

    Returns:
        By the name of each weight: the weight and "requires_grad". By the name of each layer with running statistics:
        the layer and "track_running_stats".
    """
    layers = {name: one for name, one in module.named_modules() if hasattr(one, "track_running_stats")}
    return {
        **{name: (weight, "requires_grad") for name, weight in module.named_parameters()},
        **{name: (one, "track_running_stats") for name, one in layers.items()},
    }
