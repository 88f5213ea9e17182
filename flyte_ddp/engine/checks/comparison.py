"""Compares what one rank would compute for a batch with what two would, and how each would train."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine.checks.draws import DRAWN
from flyte_ddp.engine.checks.trials import Trial, Trials, among_ranks
from flyte_ddp.engine.measures import code_location, finite_number
from flyte_ddp.engine.sharding.sharding import is_shard, on_shards
from flyte_ddp.engine.torch_compat import may_round_to_tf32, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

# Of a number and of those around it, or of what the coarsest type in use rounds by: for other numbers of rows libraries
# choose other kernels, which add in another order
TOLERANCE, ROUNDINGS = 1e-3, 8
GRADIENT_TOLERANCE, NO_GRADIENT = 1e-2, 1e-2  # of the norm of a parameter's gradient; of TOLERANCE, of that of all
SIZES = 1 << 16  # how many numbers of a tensor are looked at for their size
OTHERS = "to compare samples, call all_gather(); to normalise, use nn.BatchNorm, nn.GroupNorm or nn.LayerNorm"
IN_ORDER = "; with ghost_batch_size, batch norm must get its rows in the order of the samples"
STAGE_REMEDIES = {
    "data": "let its Dataset return each sample as it is, whatever the others of a batch",
    "augment": "draw only from the argument random, and mix no samples: do that in forward, with all_gather()",
    "forward": OTHERS,
    "measure": "use reduction='none'; " + OTHERS,
    "predictions": OTHERS,
}


def dependences(recipe: Recipe, trials: Trials, whole: Trial) -> list[str]:
    """Why the result depends on how many ranks share the batch, each reason with its place and remedy."""
    norms = {name: _norm(gradient) for name, gradient in whole.gradients.items()}
    parts = []
    for first, last in trials.parts:
        parts.append(trials(first, last))
        _take_away(whole.gradients, parts[-1].gradients)
    tolerance = tolerance_of(trials.model)
    reasons = _draws(recipe, whole, parts)
    if not reasons and parts:
        reasons = _differences(recipe, trials, whole, parts, tolerance) or (
            # all_gather() in a trial passes no gradient on to the other part
            [] if trials.gathered else _coupled_gradients(recipe, norms, whole.gradients, tolerance)
        )
    whole.gradients.clear()
    return reasons


def refuse_coupled_predictions(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """Raise InputError if the predictions of a sample depend on the others of its batch."""
    if whole.stages["predictions"] is None or whole.draws:
        return
    parts = [trials(first, last) for first, last in trials.parts]
    gaps = _gaps("predictions", whole, parts, tolerance_of(trials.model))
    if gaps:
        raise InputError(
            f"{code_location(recipe, 'predictions')}: {gaps} of a sample depends on the others of its batch: "
            f"{STAGE_REMEDIES['predictions']}"
        )


def tolerance_of(model: nn.Module) -> float:
    """By what part of their size numbers may differ that should be the same."""
    steps = [torch.finfo(weight.dtype).eps for weight in model.parameters() if weight.is_floating_point()]
    if may_round_to_tf32() and any(weight.is_cuda for weight in model.parameters()):
        steps.append(2.0**-10)
    return max([TOLERANCE, *(ROUNDINGS * step for step in steps)])


@torch.no_grad()
def _take_away(gradients: dict[str, Tensor], of_part: dict[str, Tensor]) -> None:
    """Subtracts in place, so that no more gradients are in memory than of two trials."""
    for name, gradient in of_part.items():
        if name in gradients:
            gradients[name].sub_(gradient)
    of_part.clear()


def _draws(recipe: Recipe, whole: Trial, parts: Sequence[Trial]) -> list[str]:
    """Random numbers that each rank draws for itself; those for the whole batch, the same on all ranks, are fine."""
    reasons = [
        f"{where}: draws random numbers of its own ({operation}): {_remedy(operation)}"
        for (where, operation), drawn in whole.draws.items()
        if any(part.draws[where, operation] != drawn for part in parts)
    ]
    return reasons + [
        f"{code_location(recipe, stage)}: draws numpy's or Python's random numbers, which settings.seed does not "
        f"control: let {DRAWN}"
        for stage in whole.strays
    ]


def _remedy(operation: str) -> str:
    if operation.startswith(("LSTM", "GRU", "RNN")):
        return f"give {operation} no dropout, and put nn.Dropout between layers of one nn.{operation} each"
    return f"let {DRAWN}"


def _differences(recipe: Recipe, trials: Trials, whole: Trial, parts: Sequence[Trial], tolerance: float) -> list[str]:
    """The first method that returns something else for two parts; else buffers and weights that differ."""
    for stage in whole.stages:
        gaps = _gaps(stage, whole, parts, tolerance)
        if gaps is None:
            continue
        if _gaps(stage, whole, [trials(0, trials.size)], tolerance) is not None:
            remedy = f"let {DRAWN}; count in a buffer"
            return [f"{code_location(recipe, stage)}: returns something else each time: {remedy}"]
        if _gaps(stage, whole, [trials(0, trials.size, as_second=True)], tolerance) is not None:
            return [f"{code_location(recipe, stage)}: {gaps} depends on the rank or the number of ranks: read neither"]
        return [
            (
                f"{code_location(recipe, stage)}: {gaps} of a sample depends on the others of its batch: "
                f"{STAGE_REMEDIES[stage]}{IN_ORDER if recipe.ghost_batch_size and stage == 'forward' else ''}"
            )
        ]
    followers = [
        name
        for name, buffer in whole.buffers.items()
        if any(not is_close(buffer, part.buffers.get(name, buffer), tolerance) for part in parts)
    ]
    owners = {type(trials.model.get_submodule(name.rpartition(".")[0])).__name__: name for name in followers}
    reasons = [
        f"{code_location(recipe, 'forward')}: the buffer {name} of {owner} depends on the samples of its rank: "
        "compute it from all_gather(), or keep no running statistics"
        for owner, name in owners.items()
    ]
    # exactly, since of a large table a batch may change few rows
    unlike = [name for name, total in whole.weights.items() if any(part.weights.get(name) != total for part in parts)]
    for name in unlike[:1]:
        owner = type(trials.model.get_submodule(name.rpartition(".")[0])).__name__
        reasons.append(
            f"{code_location(recipe, 'forward')}: it changes {name} of {owner} by the samples of its rank: change no "
            "weights there; of nn.Embedding, leave out max_norm"
        )
    return reasons


def _coupled_gradients(
    recipe: Recipe, norms: dict[str, float], rests: dict[str, Tensor], tolerance: float
) -> list[str]:
    """The first parameter, if any, whose gradient is not the sum of those of the parts, by the norm of the rest."""
    total = math.hypot(*norms.values())
    for name, norm in norms.items():
        gap = _norm(rests[name])
        if gap > max(GRADIENT_TOLERANCE, tolerance) * norm + NO_GRADIENT * tolerance * total:
            what = f"the gradient of {name} is not the sum of its samples' (off by {gap:.2g} of {norm:.2g})"
            remedy = "hooks and backward() must treat each sample by itself; to clip gradients, set clip_norm"
            return [f"{code_location(recipe, 'forward')}: {what}: {remedy}"]
    return []


def _norm(gradient: Tensor) -> float:
    norm: Any = torch.linalg.vector_norm(gradient.float())
    return float(norm.full_tensor() if is_shard(norm) else norm)


@torch.no_grad()  # with gradients, torch may refuse a view of a weight that has changed since
def _gaps(stage: str, whole: Trial, parts: Sequence[Trial], tolerance: float) -> str | None:
    """The name of what differs between the whole and the joined parts; None if nothing does or can be compared, such
    as rows that are padded to the longest of their part."""
    leaves = pytree.tree_flatten_with_path(whole.stages[stage])[0]
    others = [pytree.tree_leaves(part.stages[stage]) for part in parts]
    if any(len(part) != len(leaves) for part in others):
        return None
    for (path, leaf), *pieces in zip(leaves, *others, strict=True):
        if not all(isinstance(one, Tensor) and one.ndim and one.shape[1:] == leaf.shape[1:] for one in (leaf, *pieces)):
            continue
        if any(len(one) * whole.count != len(leaf) * part.count for one, part in zip(pieces, parts, strict=True)):
            continue  # not as many rows for each sample
        joined = torch.cat(pieces)
        if not is_close(leaf, joined, tolerance):
            first = path[0] if path else None
            name = repr(first.key) if isinstance(first, pytree.MappingKey) else "what it gives"
            return f"{name} (by {(leaf.double() - joined.double()).abs().max().item():.2g})"
    return None


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether each number differs by little, compared with itself or with most others: one near 0 may be the difference
    of two that are not."""
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = max(tolerance, ROUNDINGS * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other.to(one.dtype), tolerance, tolerance * _size_of(one), equal_nan=True)


def _size_of(numbers: Tensor) -> float:
    """The lower quartile of the sizes of those that are neither 0 nor infinite: a few may stand for a mask."""
    sizes = numbers.detach().abs().flatten()
    sizes = sizes[:: max(1, len(sizes) // SIZES)].double()
    sizes = sizes[sizes.isfinite() & (sizes > 0)].sort().values
    return sizes[len(sizes) // 4].item() if len(sizes) else 0.0


# --- the optimizer ---


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer; InputError if it returns anything else."""
    optimizer = recipe.optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"{code_location(recipe, 'optimizer')} must return one optimizer of torch.optim, got "
            f"{type(optimizer).__name__}: "
            "parameters that are to be treated differently are groups of one optimizer"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InputError(
            f"{code_location(recipe, 'optimizer')} must return an optimizer without a scheduler of torch, got one: "
            "nothing calls its step(), so that rates stay as it begins, which may be 0; let lr_lambda(step, steps) "
            "return what multiplies the rate"
        )
    return on_shards(optimizer)


def scaled_rates(recipe: Recipe, model: nn.Module, steps: int) -> list[str]:
    """optimizer() or lr_lambda(), if another number of ranks has them return something else; steps: of the training."""
    results = []
    for rank, world_size in ((0, 1), (1, 2)):
        with among_ranks(rank, world_size):
            few = [finite_number(recipe, "lr_lambda", step, steps) for step in sorted({0, 1, steps // 2, steps - 1})]
            results.append({"optimizer": _plain_groups(optimizer_of(recipe, model)), "lr_lambda": few})
    one, two = results
    return [
        f"{code_location(recipe, method)}: what it returns depends on the rank or the number of ranks: read "
        "neither, since batch_size is that of all ranks together"
        for method in one
        if one[method] != two[method]
    ]


def _plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of the parameter groups, as far as they can be compared."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str, tuple, Tensor))
        }
        for group in optimizer.param_groups
    ]
