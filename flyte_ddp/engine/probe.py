"""A look at a recipe before its training: does its result depend on how many ranks share a batch?

A few samples are computed whole and in two halves, as one rank and as two would. What comes out otherwise, or draws
random numbers of its own, is named with its place in the recipe, and with what to write instead.
"""

import copy
import math
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flyte_ddp.engine.batches import Batch, Split, device_generator
from flyte_ddp.engine.data_probe import SAMPLES, unequal_data
from flyte_ddp.engine.draws import DRAWN, Draws, host_state, users_line
from flyte_ddp.engine.layers import convert, has_batch_norm
from flyte_ddp.engine.measures import augment, headline_of, pairs_of, place, ratios, trained_measure
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
REMEDY = "docs/your-own-model.md has an example of each. If it is meant, set may_depend_on_ranks = True in the recipe"
OTHERS = "to compare samples, call everyone(); to normalise, use nn.BatchNorm, nn.GroupNorm or nn.LayerNorm"
STAGES = {
    "augment": "draw from the argument random alone, and mix no samples: that belongs into forward, by everyone()",
    "forward": OTHERS,
    "measure": "use reduction='none'; " + OTHERS,
}


@dataclass(frozen=True)
class Probed:
    """What a look at a recipe has found.

    Attributes:
        names: of the measures.
        headline: the one that a run is judged by.
        reasons: why the result depends on the number of ranks; only where the recipe lets that pass.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
    """

    names: Tuple[str, ...]
    headline: str
    reasons: List[str]
    sample_flops: float


def probe(recipe: Recipe, model: nn.Module, split: Split, may_be_empty: bool = False) -> Probed:
    """InputError, with the place and the remedy, for what makes the result depend on the number of ranks.

    All ranks have to call it. may_be_empty: that some rank will be without a sample in some batch.
    """
    _refuse_micro_batch(recipe, model)
    count = min(SAMPLES, len(split))
    unequal = unequal_data(recipe, split)
    reasons = [unequal] if unequal else []
    (tree,) = split.fetch(torch.arange(count), [slice(0, count)])
    look = _Looks(recipe, model, tree)
    try:
        with FlopCounterMode(display=False) as counter:
            whole = look(0, count)
            _refuse_without_gradients(recipe, look.model, whole.pairs)
        if look.everyones and not recipe.couples_samples:
            raise InputError(f"{place(recipe, 'measure')}: what calls everyone() has to set couples_samples = True")
        if count > 1:
            halves = [look(0, count // 2), look(count // 2, count)]
            reasons += _draws(recipe, whole, halves) or _differences(recipe, look, whole, halves)
        if may_be_empty:
            _refuse_unless_empty_passes(look, count)
    finally:
        vars(recipe.share).update(alone=False, stand_in=None)
    if reasons and not recipe.may_depend_on_ranks:
        raise InputError(f"the result would depend on the number of ranks: {'; '.join(reasons)}. {REMEDY}")
    names = tuple(whole.pairs)
    totals = [float(part.detach().double().sum()) for pair in whole.pairs.values() for part in pair]
    headline = headline_of(recipe, ratios(recipe, names, totals))
    return Probed(names, headline, reasons, counter.get_total_flops() / count)


@dataclass(frozen=True)
class _Look:
    """The outcome for some samples.

    Attributes:
        stages: what each method of the recipe made of them.
        draws: how many random numbers were drawn, by place and operation, but for those of our own layers.
        strays: the methods that drew from numpy's or Python's random numbers.
        buffers: of the network, afterwards.
    """

    stages: Dict[str, Any]
    pairs: Dict[str, Tuple[Tensor, Tensor]]
    draws: "Counter[Tuple[str, str]]"
    strays: List[str]
    buffers: Dict[str, Tensor]


class _Looks:
    """Computes samples first..last of a batch as the rank would that has these of it; always from the same start."""

    def __init__(self, recipe: Recipe, model: nn.Module, tree: Any):
        # A copy: what a look changes in the network, such as counts of calls, is not kept
        self.recipe, self.tree = recipe, tree
        self.model = convert(copy.deepcopy(model), recipe.share).train()
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.size = len(pytree.tree_leaves(tree)[0])
        self.device = pytree.tree_leaves(tree)[0].device
        self.everyones: List[Tensor] = []  # what everyone() gave for the whole batch, call by call

    def __call__(self, first: int, last: int) -> _Look:
        recipe, share = self.recipe, self.recipe.share
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.buffers and buffer.shape == self.buffers[name].shape:
                    buffer.copy_(self.buffers[name])
        vars(share).update(first=first, count=last - first, size=self.size, alone=True)
        share.stand_in = self._note if last - first == self.size else self._repeat(iter(self.everyones))
        self.everyones = [] if last - first == self.size else self.everyones
        part = pytree.tree_map(lambda leaf: leaf[first:last], self.tree)
        generator = device_generator(self.device)
        host = [host_state()]
        with Draws() as draws:
            part = augment(recipe, part, generator.manual_seed(0), share)
            host.append(host_state())
            generator.manual_seed(0)
            outputs = recipe.forward(self.model, part)
            host.append(host_state())
            pairs = pairs_of(recipe, outputs, Batch(part, share))
            host.append(host_state())
        strays = [stage for stage, before, after in zip(STAGES, host, host[1:], strict=False) if before != after]
        stages = {"augment": part, "forward": outputs, "measure": pairs}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return _Look(stages, pairs, draws.found, strays, buffers)

    def _note(self, mine: Tensor) -> Tensor:
        self.everyones.append(mine)
        return mine

    def _repeat(self, noted: Iterator[Tensor]) -> Any:
        return lambda mine: next(noted, mine).detach()


# --- what is never trained ---


def _refuse_micro_batch(recipe: Recipe, model: nn.Module) -> None:
    if not recipe.micro_batch:
        return
    why = ""
    if has_batch_norm(model):
        why = "beside batch norm, whose statistics are those of whole batches (or use nn.GroupNorm)"
    elif recipe.couples_samples:
        why = "beside couples_samples, which needs whole batches"
    if why:
        raise InputError(f"{type(recipe).__name__}.micro_batch must be 0 {why}, got {recipe.micro_batch}")


def _refuse_without_gradients(recipe: Recipe, model: nn.Module, pairs: Dict[str, Tuple[Tensor, Tensor]]) -> None:
    name = trained_measure(list(pairs))
    if not pairs[name][0].requires_grad:
        raise InputError(
            f"{place(recipe, 'measure')}: no gradient comes from {name!r}: compute it by torch from outputs, without "
            "detach(), argmax() or no_grad(), and leave some parameters trainable"
        )
    model.zero_grad()
    pairs[name][0].sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        named = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        raise InputError(
            f"{place(recipe, 'forward')}: no gradient reaches the parameters {named}: use them, remove them, or "
            "call requires_grad_(False) on them in model()"
        )
    model.zero_grad()


def _refuse_unless_empty_passes(look: _Looks, count: int) -> None:
    try:
        look(count, count)
    except Exception as error:
        frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        where = users_line(reversed([(frame.f_code.co_filename, line) for frame, line in frames]))
        raise InputError(
            f"{where or place(look.recipe, 'forward')}: a rank without any sample of a short last batch fails here "
            f"({type(error).__name__}: {error}): write it for n = 0 too, or choose batch_size and test_batch_size so "
            "that each rank has samples of the last batch"
        ) from error


# --- what depends on the number of ranks ---


def _draws(recipe: Recipe, whole: _Look, halves: Sequence[_Look]) -> List[str]:
    """Random numbers of which each rank draws its own; one for the whole batch, the same on all ranks, may be."""
    found = [
        f"{where}: draws random numbers of its own ({operation}): {_remedy(operation)}"
        for (where, operation), drawn in whole.draws.items()
        if any(half.draws[where, operation] != drawn for half in halves)
    ]
    return found + [
        f"{place(recipe, stage)}: draws numpy's or Python's random numbers, which settings.seed does not decide: "
        f"let {DRAWN}"
        for stage in whole.strays
    ]


def _remedy(operation: str) -> str:
    if operation.startswith(("LSTM", "GRU", "RNN")):
        return f"give {operation} no dropout, and put nn.Dropout between layers of one nn.{operation} each"
    if "dropout" in operation or "bernoulli" in operation or "attention" in operation:
        return "use a layer nn.Dropout, for whole channels nn.Dropout2d, for attention nn.MultiheadAttention"
    return f"let {DRAWN}"


def _differences(recipe: Recipe, look: _Looks, whole: _Look, halves: Sequence[_Look]) -> List[str]:
    """Of the methods the first that gives something else for two halves; and the buffers that do."""
    for stage, remedy in STAGES.items():
        gaps = _gaps(whole.stages[stage], [half.stages[stage] for half in halves])
        if gaps is None:
            continue
        again = look(0, look.size)
        if _gaps(whole.stages[stage], [again.stages[stage]]) is not None:
            return [f"{place(recipe, stage)}: gives something else each time: let {DRAWN}"]
        return [f"{place(recipe, stage)}: {gaps} of a sample depends on the others of its batch: {remedy}"]
    followers = [
        name
        for name, buffer in whole.buffers.items()
        if any(not _is_close(buffer, half.buffers.get(name, buffer)) for half in halves)
    ]
    owners = {type(look.model.get_submodule(name.rpartition(".")[0])).__name__: name for name in followers}
    return [
        f"{place(recipe, 'forward')}: the buffer {name} of {owner} follows the samples of its rank: compute it from "
        "those of everyone(), or keep no running statistics"
        for owner, name in owners.items()
    ]


def _gaps(whole: Any, parts: Sequence[Any]) -> Optional[str]:
    """The name of what the parts, joined, have otherwise; None where they are the same, or cannot be compared."""
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
