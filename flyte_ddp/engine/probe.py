"""Checks a recipe before training: does its result depend on how many ranks share a batch?

A few samples are computed whole and in two halves, as by one rank and by two. Whatever differs, or draws random numbers
of its own, is reported with its place in the recipe and with what to write instead.
"""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flyte_ddp.engine.batches import Split
from flyte_ddp.engine.by_row import ByRow
from flyte_ddp.engine.data_probe import SAMPLES, unequal_data
from flyte_ddp.engine.draws import DRAWN
from flyte_ddp.engine.measures import headline_of, place, ratios, trained_measure
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.engine.trials import Trial, Trials
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

MORE_SAMPLES, PART = 1024, 64  # how many samples are looked through for gradients, and how many at a time
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
REMEDY = "docs/your-own-model.md has an example of each. If it is meant, set may_depend_on_ranks = True in the recipe"
OTHERS = "to compare samples, call everyone(); to normalise, use nn.BatchNorm, nn.GroupNorm or nn.LayerNorm"
STAGE_REMEDIES = {
    "augment": "draw only from the argument random, and mix no samples: do that in forward, with everyone()",
    "forward": OTHERS,
    "measure": "use reduction='none'; " + OTHERS,
}


@dataclass(frozen=True)
class Probed:
    """What probing a recipe has found.

    Attributes:
        names: of the measures.
        headline: the name of the main measure.
        reasons: why the result depends on the number of ranks; only if the recipe allows that.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        rows: what draws by row, having seen where samples are in what is drawn.
    """

    names: Tuple[str, ...]
    headline: str
    reasons: List[str]
    sample_flops: float
    rows: ByRow


def probe(recipe: Recipe, model: nn.Module, split: Split) -> Probed:
    """Raises InputError, with place and remedy, for whatever makes the result depend on the number of ranks.

    A collective.
    """
    count = min(SAMPLES, len(split))
    unequal = unequal_data(recipe, split)
    reasons = [unequal] if unequal else []
    (tree,) = split.fetch(torch.arange(count), [slice(0, count)])
    try:
        trial = Trials(recipe, model, tree)
        with FlopCounterMode(display=False) as counter:
            whole = trial(0, count)
            _refuse_micro_batch(recipe, trial.rows)
            unreached = _unreached(recipe, trial.model, whole.pairs)
        if unreached:
            _refuse_unreached(recipe, model, split, unreached)
        if trial.everyones and not recipe.couples_samples:
            raise InputError(f"{place(recipe, 'measure')}: a recipe that calls everyone() needs couples_samples = True")
        if count > 1:
            halves = [trial(0, count // 2), trial(count // 2, count)]
            reasons += _draws(recipe, whole, halves) or _differences(recipe, trial, whole, halves)
    finally:
        vars(recipe.share).update(alone=False, stand_in=None)
    if reasons and not recipe.may_depend_on_ranks:
        raise InputError(f"the result would depend on the number of ranks: {'; '.join(reasons)}. {REMEDY}")
    names = tuple(whole.pairs)
    totals = [float(part.detach().double().sum()) for pair in whole.pairs.values() for part in pair]
    headline = headline_of(recipe, ratios(recipe, names, totals))
    return Probed(names, headline, reasons, counter.get_total_flops() / count, trial.rows)


# --- what is never trained ---


def _refuse_micro_batch(recipe: Recipe, rows: ByRow) -> None:
    if not recipe.micro_batch:
        return
    why = ""
    if rows.normalised:
        why = "with batch norm, whose statistics are those of whole batches (or use nn.GroupNorm)"
    elif recipe.couples_samples:
        why = "with couples_samples, which needs whole batches"
    if why:
        raise InputError(f"{type(recipe).__name__}.micro_batch must be 0 {why}, got {recipe.micro_batch}")


def _unreached(recipe: Recipe, model: nn.Module, pairs: Dict[str, Tuple[Tensor, Tensor]]) -> Set[str]:
    """The trainable parameters that get no gradient from these samples; InputError if none does."""
    name = trained_measure(list(pairs))
    if not pairs[name][0].requires_grad:
        raise InputError(
            f"{place(recipe, 'measure')}: no gradient comes from {name!r}: compute it with torch from outputs, without "
            "detach(), argmax() or no_grad(), and leave some parameters trainable"
        )
    model.zero_grad()
    pairs[name][0].sum().backward()
    unreached = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    model.zero_grad()
    return unreached


def _refuse_unreached(recipe: Recipe, model: nn.Module, split: Split, unreached: Set[str]) -> None:
    """A few samples need not reach every expert of a network: only what many more do not reach either is refused."""
    order = torch.linspace(0, len(split) - 1, min(MORE_SAMPLES, len(split))).long()
    parts = [slice(start, start + PART) for start in range(0, len(order), PART)]
    for tree in split.fetch(order, parts):
        trial = Trials(recipe, model, tree)
        unreached = unreached & _unreached(recipe, trial.model, trial(0, trial.size).pairs)
        if not unreached:
            return
    names = [name for name, _ in model.named_parameters() if name in unreached]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise InputError(
        f"{place(recipe, 'forward')}: no gradient reaches the parameters {named} from any of {len(order)} samples: use "
        "them, remove them, or call requires_grad_(False) on them in model()"
    )


# --- what depends on the number of ranks ---


def _draws(recipe: Recipe, whole: Trial, halves: Sequence[Trial]) -> List[str]:
    """Random numbers that each rank draws for itself; those for the whole batch, the same on all ranks, are fine."""
    found = [
        f"{where}: draws random numbers of its own ({operation}): {_remedy(operation)}"
        for (where, operation), drawn in whole.draws.items()
        if any(half.draws[where, operation] != drawn for half in halves)
    ]
    return found + [
        f"{place(recipe, stage)}: draws numpy's or Python's random numbers, which settings.seed does not control: "
        f"let {DRAWN}"
        for stage in whole.strays
    ]


def _remedy(operation: str) -> str:
    if operation.startswith(("LSTM", "GRU", "RNN")):
        return f"give {operation} no dropout, and put nn.Dropout between layers of one nn.{operation} each"
    if "dropout" in operation or "bernoulli" in operation or "attention" in operation:
        return "use a layer nn.Dropout, for whole channels nn.Dropout2d, for attention nn.MultiheadAttention"
    return f"let {DRAWN}"


def _differences(recipe: Recipe, trial: Trials, whole: Trial, halves: Sequence[Trial]) -> List[str]:
    """The first method that returns something else for two halves, and the buffers that end up different."""
    for stage, remedy in STAGE_REMEDIES.items():
        gaps = _gaps(whole.stages[stage], [half.stages[stage] for half in halves])
        if gaps is None:
            continue
        again = trial(0, trial.size)
        if _gaps(whole.stages[stage], [again.stages[stage]]) is not None:
            return [f"{place(recipe, stage)}: returns something else each time: let {DRAWN}"]
        return [f"{place(recipe, stage)}: {gaps} of a sample depends on the others of its batch: {remedy}"]
    followers = [
        name
        for name, buffer in whole.buffers.items()
        if any(not _is_close(buffer, half.buffers.get(name, buffer)) for half in halves)
    ]
    owners = {type(trial.model.get_submodule(name.rpartition(".")[0])).__name__: name for name in followers}
    return [
        f"{place(recipe, 'forward')}: the buffer {name} of {owner} depends on the samples of its rank: compute it from "
        "everyone(), or keep no running statistics"
        for owner, name in owners.items()
    ]


def _gaps(whole: Any, parts: Sequence[Any]) -> Optional[str]:
    """The name of what differs between the whole and the joined parts; None if nothing does or can be compared."""
    leaves, others = pytree.tree_flatten_with_path(whole)[0], [pytree.tree_leaves(part) for part in parts]
    if any(len(part) != len(leaves) for part in others):
        return None
    for (path, leaf), *pieces in zip(leaves, *others, strict=True):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or sum(map(len, pieces)) != len(leaf):
            continue
        joined = torch.cat(pieces)
        if not _is_close(leaf, joined):
            gap = (leaf.double() - joined.double()).abs().max().item() if joined.shape == leaf.shape else math.nan
            first = path[0] if path else None
            name = repr(first.key) if isinstance(first, pytree.MappingKey) else "what it gives"
            return f"{name} (by {gap:.2g})"
    return None


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other.to(one.dtype), equal_nan=True, **TOLERANCE)
