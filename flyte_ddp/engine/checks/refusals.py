"""Refusals by a single trial of a recipe: what it shows can't be trained, or not resumed."""

import torch
from torch import Tensor, nn

from flyte_ddp.engine.batches.splits import Split, Subset, spread
from flyte_ddp.engine.checks.trials import Trial, Trials, is_same
from flyte_ddp.engine.measures import code_location, trained_measure
from flyte_ddp.engine.sharding.sharding import OFF, is_sharded
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed

MORE_SAMPLES, PART = 1024, 64  # how many samples are looked through for gradients, and how many at a time


def refuse_untrainable(recipe: Recipe, model: nn.Module, split: Split, trials: Trials, whole: Trial) -> None:
    """Raise InputError, with place and remedy. whole: the trial of all samples."""
    refuse_gathering(recipe, trials)
    _refuse_lost(recipe, trials, whole)
    _refuse_changed(recipe, trials, whole)
    _refuse_without_gradients(recipe, whole)
    if not is_sharded(trials.model):
        _refuse_reentrant(recipe, whole)
    _refuse_unreached(recipe, model, split, trials, whole)


def refuse_gathering(recipe: Recipe, trials: Trials) -> None:
    """Refuse all_gather() unless each rank computes its whole share at once, with the whole network."""
    if not trials.gathered:
        return
    others = [method for method in trials.gathering if method != "measure"]
    if recipe.settings.virtual_ranks and others:
        raise InputError(
            f"{code_location(recipe, others[0])}: with virtual_ranks all_gather() must be called in measure() alone, "
            "as the network is computed part by part: gather there what it returns, or set virtual_ranks to 0"
        )
    where = f"for {type(recipe).__name__}, which calls all_gather()"
    if recipe.micro_batch and trials.is_training:
        raise InputError(f"micro_batch must be 0 {where}, got {recipe.micro_batch}: set it to 0")
    if is_sharded(trials.model):
        raise InputError(f"options.sharding must be off {where}: leave it out")


def refuse_uneven_units(recipe: Recipe, whole: Trial, one: Trial) -> None:
    """Refuse layers of fsdp_units that are not called alike for all samples. one: the trial of a single sample.

    Ranks that call different ones would take one's rows for those of another, without an error.
    """
    if one.units != whole.units:
        some = sorted({*one.units} ^ {*whole.units}) or whole.units
        raise InputError(
            f"{code_location(recipe, 'forward')}: with sharding it must call the layers that "
            f"{type(recipe).__name__}.fsdp_units names alike for all samples, and does not so call {listed(some)}: "
            f"name a layer that holds them all, {OFF}"
        )


def _refuse_changed(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Refuse forward passes that change trained weights: by its own samples, each rank would change them otherwise."""
    trained = {name for name, weight in trials.model.named_parameters() if weight.requires_grad}
    for name in whole.changed:
        if name in trained:
            owner = type(trials.model.get_submodule(name.rpartition(".")[0])).__name__
            raise InputError(
                f"{code_location(recipe, 'forward')}: it changes {name} of {owner} by the samples of its rank: change "
                "no trained weights there; of nn.Embedding, leave out max_norm"
            )


def _refuse_lost(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Refuse what a checkpoint would lack, and what model() has no place for.

    That is a state_dict with more than tensors, buffers that a step changes and that aren't persistent, and persistent
    buffers that a step creates, or gives another shape.
    """
    kept = trials.model.state_dict()
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{code_location(recipe, 'model')}: its state_dict must have nothing but tensors, got {name} "
                f"({type(value).__name__}): let get_extra_state() return a tensor, or leave it out"
            )
    for name, now in whole.buffers.items():
        before = trials.buffers.get(name)
        is_unchanged = before is not None and is_same(now, before)
        is_fitting = before is not None and now.shape == before.shape
        if is_unchanged or is_fitting == (name in kept):  # a cache that grows is made again
            continue
        owner = type(trials.model.get_submodule(name.rpartition(".")[0])).__name__
        does, remedy = "creates", "of which model() has none of this shape: create it in its __init__"
        if is_fitting:
            does, remedy = "changes", "which no checkpoint has: register it with persistent=True"
        raise InputError(f"{code_location(recipe, 'model')}: forward {does} the buffer {name} of {owner}, {remedy}")


def refuse_moving_buffers(recipe: Recipe, trials: Trials, tested: Trial) -> None:
    """Refuse buffers of the state_dict that an evaluation changes: how often, depends on the number of ranks."""
    for name in trials.buffers.keys() & trials.model.state_dict().keys():
        now = tested.buffers.get(name)
        if now is None or not is_same(now, trials.buffers[name]):
            raise InputError(
                f"{code_location(recipe, 'forward')}: with virtual_ranks an evaluation must leave buffers as they are, "
                f"and it changes {name}: change it only if self.training, or set virtual_ranks to 0"
            )


def _refuse_without_gradients(recipe: Recipe, whole: Trial) -> None:
    name = trained_measure(list(whole.pairs))
    values, weights = whole.pairs[name]
    if not values.requires_grad:
        raise InputError(
            f"{code_location(recipe, 'measure')}: no gradient comes from {name!r}: compute it with torch from "
            "outputs, without detach(), argmax() or no_grad(), and leave some parameters trainable"
        )
    if weights.requires_grad:
        raise InputError(
            f"{code_location(recipe, 'measure')}: the weights of {name!r} must not need a gradient, since only "
            "its values are differentiated: call detach() on them"
        )
    sparse = [name for name, gradient in whole.gradients.items() if gradient.layout != torch.strided]
    if sparse:
        raise InputError(
            f"{code_location(recipe, 'model')}: the gradient of {sparse[0]} must not be sparse: create its layer with "
            "sparse=False"
        )


def _refuse_reentrant(recipe: Recipe, whole: Trial) -> None:
    """Refuse reentrant checkpoints: parameters would get gradients twice in a step, an error to DDP."""
    seen, ahead = set(), [whole.pairs[trained_measure(list(whole.pairs))][0].grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise InputError(
                f"{code_location(recipe, 'forward')}: torch.utils.checkpoint must have use_reentrant=False: change it, "
                "or name the layers in the recipe's activation_checkpointing"
            )
        seen.add(node)
        ahead += [function for function, _ in node.next_functions]


def _refuse_unreached(recipe: Recipe, model: nn.Module, split: Split, trials: Trials, whole: Trial) -> None:
    """Refuse parameters that get no gradient from MORE_SAMPLES; few samples need not reach every expert."""
    trainable = [name for name, parameter in trials.model.named_parameters() if parameter.requires_grad]
    unreached = [name for name in trainable if name not in whole.gradients]
    some = spread(split, min(MORE_SAMPLES, len(split)))
    for seed, chosen in enumerate(some.split(PART)):
        if not unreached:
            return
        part = Subset(split, len(chosen), chosen.__getitem__)
        trial = Trials(recipe, model, part, len(part), copied=trials.model)(seed=seed + 1)
        unreached = [name for name in unreached if name not in trial.gradients]
    if unreached:
        raise InputError(
            f"{code_location(recipe, 'forward')}: no gradient reaches the parameters {listed(unreached)} from "
            f"{len(some)} samples: use them, remove them, or call requires_grad_(False) on them in model(); if "
            "torch.utils.checkpoint computes them, give it use_reentrant=False"
        )
