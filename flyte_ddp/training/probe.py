"""A look at a recipe before its training: does its result depend on how many ranks share a batch?

A few samples are computed whole and in two halves, as one rank and as two would, and what draws random numbers of its
own is noted with the line of the recipe that it comes from. It takes less than a second.
"""

import copy
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import flyte_ddp
from flyte_ddp.recipe import Random, Recipe
from flyte_ddp.training.batches import Batch, Split, device_generator
from flyte_ddp.training.errors import InputError
from flyte_ddp.training.layers import Attention, ChannelDropout, Dropout, convert, has_batch_norm
from flyte_ddp.training.loading import Streamed, read_samples
from flyte_ddp.training.measures import headline_of, pairs_of, place, ratios, trained_measure

SAMPLES = 4
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
REMEDY = (
    "set may_depend_on_ranks = True in the recipe if that is meant; docs/your-own-model.md has what to write instead"
)


def probe(recipe: Recipe, model: nn.Module, split: Split) -> Tuple[Tuple[str, ...], str, List[str]]:
    """The names of the measures, the headline among them, and why the result depends on the number of ranks.

    Such reasons are there only where the recipe lets them pass: else InputError names them, and the remedy.
    """
    share = recipe.share
    # A copy: what the look changes in it, such as counts of calls, is not kept
    model = convert(copy.deepcopy(model), share).train()
    count = min(SAMPLES, len(split))
    (tree,) = split.fetch(torch.arange(count), [slice(0, count)])
    if recipe.micro_batch and recipe.couples_samples:
        raise InputError(
            f"micro_batch must be 0 where couples_samples is set, since everyone() is of whole batches, got "
            f"{recipe.micro_batch}: set it to 0"
        )
    if recipe.micro_batch and has_batch_norm(model):
        raise InputError(
            f"micro_batch must be 0 with batch norm, whose statistics are those of whole batches, got "
            f"{recipe.micro_batch}: set it to 0, or use nn.GroupNorm"
        )
    share.alone = True
    try:
        share.first, share.count, share.size = 0, count, count
        tree = recipe.augment(tree, Random(device_generator(split.device).manual_seed(0), share))
        whole, draws = _measure(recipe, model, tree, 0, count, count)
        reasons = [f"{line} draws random numbers of its own ({name})" for line, name in draws]
        if count > 1 and not recipe.couples_samples and not draws:
            reasons += _differences(recipe, model, tree, whole)
        reasons += _same_sample_twice(recipe, split)
        pairs = whole[trained_measure(list(whole))]
        if pairs[0].requires_grad is False:
            raise InputError(
                f"{place(recipe, 'measure')}: no gradient reaches the loss: compute it by torch, undetached"
            )
        model.zero_grad()
        pairs[0].sum().backward()
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            named = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            raise InputError(
                f"{place(recipe, 'forward')}: no gradient reaches the parameters {named}: use them, remove them, or "
                "have model() say requires_grad_(False) of them"
            )
    finally:
        share.alone = False
    if reasons and not recipe.may_depend_on_ranks:
        raise InputError(f"the result would depend on the number of ranks: {'; '.join(reasons)}. {REMEDY}")
    names = tuple(whole)
    totals = [float(part.detach().double().sum()) for pair in whole.values() for part in pair]
    return names, headline_of(recipe, ratios(recipe, names, totals)), reasons


def _measure(
    recipe: Recipe, model: nn.Module, tree: Any, first: int, last: int, size: int
) -> Tuple[Dict[str, Tuple[Tensor, Tensor]], List[Tuple[str, str]]]:
    """The measures of samples first..last of so many, and what draws random numbers of its own."""
    part = pytree.tree_map(lambda leaf: leaf[first:last], tree)
    share = recipe.share
    share.first, share.count, share.size = first, last - first, size
    device_generator(pytree.tree_leaves(part)[0].device).manual_seed(0)
    with _Draws() as draws:
        outputs = recipe.forward(model, part)
        pairs = pairs_of(recipe, outputs, Batch(part, share))
    return pairs, draws.found


def _differences(recipe: Recipe, model: nn.Module, tree: Any, whole: Dict[str, Tuple[Tensor, Tensor]]) -> List[str]:
    """Of the measures that come out otherwise in two halves."""
    count = len(pytree.tree_leaves(tree)[0])
    halves = [
        _measure(recipe, model, tree, first, last, count)[0] for first, last in ((0, count // 2), (count // 2, count))
    ]
    reasons = []
    for name, pair in whole.items():
        for part, values in enumerate(pair):
            again = torch.cat([half[name][part] for half in halves])
            if not torch.allclose(values, again, equal_nan=True, **TOLERANCE):
                gap = float((values - again).detach().abs().max())
                reasons.append(f"{place(recipe, 'measure')}: {name!r} of a sample depends on the others (by {gap:.2g})")
                break
    return reasons


def _same_sample_twice(recipe: Recipe, split: Split) -> List[str]:
    """A Dataset that gives another sample each time draws numbers that no seed of ours decides."""
    if not isinstance(split, Streamed):
        return []
    once, again = (pytree.tree_leaves(read_samples(split.dataset, np.zeros(1, np.int64))) for _ in range(2))
    if all((torch.as_tensor(a) == torch.as_tensor(b)).all() for a, b in zip(once, again, strict=True)):
        return []
    return [f"{type(split.dataset).__name__}, the Dataset of {place(recipe, 'data')}, gives another sample each time"]


class _Draws(TorchDispatchMode):
    """Notes operations that draw random numbers, but for those of our own layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: List[Tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _really_draws(func, args, kwargs):
            found = _caller()
            if found and (found, func.name()) not in self.found:
                self.found.append((found, func.name()))
        return func(*args, **kwargs)


def _really_draws(func: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> bool:
    """Attention and recurrent layers always call operations that could draw: their dropout says whether they do."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    probability = next((given[name] for name in ("dropout_p", "dropout", "p") if name in given), 1.0)
    return bool(probability) and given.get("train", True) is not False


def _caller() -> str:
    """'file, line n' of the recipe's code that the call comes from; empty where it is our own layers'."""
    ours, torchs = str(Path(flyte_ddp.__path__[0])), str(Path(torch.__path__[0]))
    frame, found = sys._getframe(), ""
    while frame:
        if isinstance(frame.f_locals.get("self"), (Dropout, ChannelDropout, Attention)):
            return ""
        name = frame.f_code.co_filename
        if not found and not name.startswith((ours, torchs, "<")):
            found = f"{name}, line {frame.f_lineno},"
        frame = frame.f_back  # type: ignore[assignment]
    return found or "the network"
