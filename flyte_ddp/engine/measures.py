"""Calls of a recipe's methods that check what these return, and the figures that are reported from its measures."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.seeds import seed_part
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Random, Recipe

TOKENS = "tokens"  # the measure whose sum is the number of tokens


def finite_number(recipe: Recipe, method: str, *arguments: int) -> float:
    """Call a recipe's method, such as lr_lambda, with these arguments, and return its result as a float.

    Raises:
        InputError: The result is no number, or NaN or infinite. Errors of the method itself are raised as they are.
    """
    returned = getattr(recipe, method)(*arguments)
    number = math.nan
    with suppress(TypeError, ValueError, RuntimeError):  # torch's, for a tensor of several elements
        number = float(1.0 * returned)  # which refuses text
    if not math.isfinite(number):
        called = f"{method}({', '.join(map(str, arguments))})"
        raise InputError(f"{code_location(recipe, method)} must return a finite number, got {returned!r} from {called}")
    return number


def make_checked_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer for the network, and check that it has only the network's weights.

    Raises:
        InputError: The optimizer has a weight that is not the network's.
    """
    # The trials before the first step use copies of the network, so they miss a recipe that keeps the original
    optimizer = recipe.optimizer(model)
    own = {id(weight) for weight in model.parameters()}
    others = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in own]
    if others:
        raise InputError(
            f"{code_location(recipe, 'optimizer')} must be given the network's parameters, got one of shape "
            f"{tuple(others[0].shape)} that is none of them: no gradient of it would be exchanged, or kept on a "
            "resume; make it a part of the network that model() returns"
        )
    return optimizer


def augment(recipe: Recipe, tree: Any, seed: int, share: BatchShare, epoch: int = 0) -> Any:
    """Augment a batch as the recipe does, and return the new batch.

    If the recipe does not define augment(), the batch is returned as it is, and nothing else happens. Otherwise
    recipe.share is set, and the global random generators are seeded.

    Args:
        recipe: the recipe.
        tree: the batch.
        seed: the seed of the random numbers that augment() draws.
        share: which samples of the global batch this batch has.
        epoch: the number of the epoch, from 0, which augment() finds in its argument `random`.

    Raises:
        InputError: augment() returns anything but tensors, or a tensor with another number of samples.
    """
    if getattr(recipe.augment, "__func__", None) is Recipe.augment:  # as it is: nothing is drawn
        return tree
    recipe.share = share
    seed_part(seed, share.part)  # of code that does not draw from the argument random
    changed = recipe.augment(tree, Random(seed, recipe.share, recipe.device, epoch))
    leaves = pytree.tree_leaves(changed)
    if not leaves or any(not isinstance(leaf, Tensor) or leaf.shape[:1] != (share.count,) for leaf in leaves):
        raise InputError(f"{code_location(recipe, 'augment')} must return tensors of the same {share.count} samples")
    return changed


def trained_measure(names: Sequence[str]) -> str:
    """Return the name of the measure to minimize: "objective" if it is one of the measures, otherwise "loss"."""
    return "objective" if "objective" in names else "loss"


def compute_pairs(
    recipe: Recipe, outputs: Any, batch: Batch, names: Sequence[str] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Call the recipe's measure() on the outputs of a batch, and return each measure's values and weights.

    The caller sets recipe.share before, which measure() may read.

    Args:
        recipe: the recipe.
        outputs: what the recipe's forward returned for the batch.
        batch: n samples. A rank without samples of its own has borrowed another rank's, which are left out of the
            result.
        names: the measures in order; by default all of them, with "loss" first.

    Returns:
        Values and weights by name, (n,) float32 each; (0,) if the samples are borrowed. The weights are 1 if measure()
        returns none.

    Raises:
        InputError: The outputs are None, or measure() does not return a dict with "loss" and one value for each sample,
            or its names are not `names`. The message names the place in the recipe.
    """
    if outputs is None:
        raise InputError(f"{code_location(recipe, 'forward')} must return the network's outputs, got None")
    measured = recipe.measure(outputs, batch.tree)
    if not isinstance(measured, dict) or "loss" not in measured:
        got = f"names {sorted(measured)}" if isinstance(measured, dict) else type(measured).__name__
        raise InputError(f'{code_location(recipe, "measure")} must return a dict with "loss" in it, got {got}')
    numbered = [name for name in measured if not isinstance(name, str)]
    if numbered:
        where = code_location(recipe, "measure")
        raise InputError(f"{where}: the names of measures must be strings, got {numbered[0]!r}")
    if names and set(measured) != set(names):
        raise InputError(
            f"{code_location(recipe, 'measure')} must always return the same measures, {', '.join(sorted(names))}, got "
            f"{', '.join(sorted(measured))}"
        )
    count = batch.share.count
    pairs = {}
    ones = torch.ones(count, dtype=torch.float32, device=recipe.device)
    for name in names or sorted(measured, key=lambda name: (name != "loss", list(measured).index(name))):
        measure = measured[name]
        values, weights = measure if isinstance(measure, tuple) else (measure, None)
        for part, tensor in (("values", values), ("weights", weights)):
            if tensor is None and part == "weights":
                continue
            if not isinstance(tensor, Tensor) or tensor.shape != (count,):
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                remedy = "use reduction='none', and mean over all dimensions but the first"
                if shape == (count, count):
                    remedy = f"({count}, 1) beside ({count},) gives it, so call squeeze(1) on the first"
                raise InputError(
                    f"{code_location(recipe, 'measure')}: {part} of {name!r} must have one entry for each sample, "
                    f"shape ({count},), got {shape}: {remedy}"
                )
        pair = values.float(), ones if weights is None else weights.float()
        pairs[name] = batch.share.own(pair[0]), batch.share.own(pair[1])
    return pairs


def check_rows(recipe: Recipe, predictions: Any, count: int, others: Tensor | None = None) -> None:
    """Check that the predictions of a batch can be saved in one array with those of other batches.

    Args:
        recipe: the recipe, for the message.
        predictions: what recipe.predictions() has returned.
        count: the number of samples in the batch.
        others: (m, ...), predictions of another batch; None if there are none yet.

    Raises:
        InputError: The predictions are no tensor with a row for each sample, or the rows of the two batches differ in
            shape.
    """
    where = code_location(recipe, "predictions")
    if not isinstance(predictions, Tensor) or predictions.shape[:1] != (count,):
        got = tuple(predictions.shape) if isinstance(predictions, Tensor) else type(predictions).__name__
        raise InputError(f"{where} must return a tensor with a row for each of the {count} samples, got {got}")
    if others is None:
        return
    one, other = tuple(predictions.shape[1:]), tuple(others.shape[1:])
    if one != other:
        raise InputError(
            f"{where} must return rows of the same shape for all batches, got {one} and {other}: pad them to the "
            "longest of the split"
        )


def mismatched(outputs: Any) -> Any:
    """Return the outputs, each moved to the next sample of the batch, and the last one to the first.

    Measured against the batch, they have the loss of guessing. Tensors without dimensions, and leaves that are no
    tensors, stay as they are.
    """
    return pytree.tree_map(lambda leaf: leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.ndim else leaf, outputs)


def sum_measures(pairs: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the values and weights: (2 k,) float64, value and weight of each of k measures, alternating."""
    return torch.stack([part.double() for pair in pairs.values() for part in pair]).sum(1)


def compute_ratios(recipe: Recipe, names: Sequence[str], pairs: Sequence[float]) -> dict[str, float]:
    """Compute the measures to report from their sums, and let the recipe's derive() change or add measures.

    A measure whose weights add up to 0 is NaN. A measure "objective", which is trained but not reported, is left out.

    Args:
        recipe: the recipe.
        names: the names of the k measures.
        pairs: (2 k,) numbers, the sum of values and the sum of weights of each measure, alternating.

    Returns:
        The measures by name.

    Raises:
        InputError: derive() returns anything but names and numbers, or leaves the loss out.
    """
    measures = {
        name: value / weight if weight else math.nan
        for name, value, weight in zip(names, pairs[::2], pairs[1::2], strict=True)
        if name != "objective"
    }
    derived = recipe.derive(measures)
    try:
        reported = {name: float(value) for name, value in derived.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # torch's, for a tensor of several elements
        raise InputError(
            f"{code_location(recipe, 'derive')} must return a dict of names and numbers: {error}"
        ) from None
    if "loss" not in reported:
        raise InputError(
            f"{code_location(recipe, 'derive')} must keep the loss, got {', '.join(reported)}: return "
            "{**measures, ...}"
        )
    return reported


def find_headline(recipe: Recipe, measures: dict[str, float]) -> str:
    """Return the name of the main measure.

    This is recipe.headline if it is set. Otherwise it is the first measure except the loss and "tokens", or "loss" if
    there is no other.

    Raises:
        InputError: recipe.headline is none of the measures.
    """
    if recipe.headline and recipe.headline not in measures:
        raise InputError(
            f"{type(recipe).__name__}.headline must be one of {', '.join(measures)}, got {recipe.headline!r}: name "
            "one of them, or let measure() return it"
        )
    others: list[str] = [name for name in measures if name not in ("loss", TOKENS)]
    return recipe.headline or next(iter(others), "loss")
