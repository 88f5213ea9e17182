"""A trial of a recipe before training: can it be trained, saved, resumed and evaluated?

A few samples are computed as in a training step, and a few as in evaluation. Whatever would fail, or be lost by a
resume, is reported with its place in the recipe and with what to write instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from flyte_ddp.engine.batches.batches import Batch, EvaluationBatches
from flyte_ddp.engine.batches.lengths import lengths_of
from flyte_ddp.engine.batches.splits import Split, Subset
from flyte_ddp.engine.checks.comparison import (
    optimizer_of,
    refuse_coupled_predictions,
    refuse_scaled_rates,
    refuse_unsteady,
    some_rates,
)
from flyte_ddp.engine.checks.data_probe import of_first_rank, on_any_rank, refuse_coupled_reading, unequal_data
from flyte_ddp.engine.checks.lost_state import SAVE_IT, lost_on_resume, refuse_lost_state
from flyte_ddp.engine.checks.refusals import (
    refuse_gathering,
    refuse_moving_buffers,
    refuse_uneven_units,
    refuse_untrainable,
)
from flyte_ddp.engine.checks.trials import Trial, Trials, changed_weights, is_same
from flyte_ddp.engine.measures import check_rows, code_location, headline_of, mismatched, pairs_of, ratios
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.torch_compat import count_in_total
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed

SEEDS = 8  # with which a sample is looked at for layers that are dropped at random
SAMPLES, TEST_SAMPLES = 8, 32  # that are computed: as in a training step, and without gradients as in evaluation


@dataclass(frozen=True)
class Probed:
    """The findings of probing a recipe.

    Attributes:
        names: of the measures.
        headline: the name of the main measure.
        warnings: what is hardly meant, such as what changes all samples of a batch alike, or state that a resume loses.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        moving: the weights, by name, that are not trained but changed otherwise, such as a teacher's.
        changing: the buffers, by name, that a forward pass changes.
        has_unused: whether a sample leaves trained weights unused, as an expert's.
        gathers: whether it calls all_gather(), in training or in evaluation.
        is_mixed: whether evaluation pairs outputs with other samples, too, for want of a loss of guessing.
    """

    names: tuple[str, ...]
    headline: str
    warnings: list[str]
    sample_flops: float
    moving: frozenset[str]
    changing: tuple[str, ...]
    has_unused: bool
    gathers: bool
    is_mixed: bool


class _Tried(NamedTuple):
    """The findings of a training step, as Probed has them.

    Attributes:
        totals: the sums of values and weights of each measure, alternating.
        gathers: whether the recipe calls all_gather().
    """

    names: tuple[str, ...]
    totals: list[float]
    sample_flops: float
    moving: frozenset[str]
    changing: tuple[str, ...]
    has_unused: bool
    gathers: bool
    warnings: list[str]


def probe(recipe: Recipe, model: nn.Module, splits: dict[str, Split], steps: int, constant_loss: float) -> Probed:
    """Try a recipe; a collective.

    The order matters: a step of the optimizer changes the weights of the trial, so what compares comes before it, and
    what asks which weights follow the trained ones (_moving) after it.

    Args:
        splits: by name; those that are computed are "train" and "test".
        steps: of the whole training.
        constant_loss: of guessing; 0 if it is unknown.

    Raises:
        InputError: The recipe would fail in the first step, or only after an epoch, or ranks have other data. It names
            the place and the remedy.
    """
    if reasons := unequal_data(code_location(recipe, "data"), splits):
        raise InputError(f"all ranks must have the same samples each time: {'; '.join(reasons)}")
    if recipe.settings.virtual_ranks:
        for split in splits.values():
            refuse_coupled_reading(recipe, split)
    try:
        training = _try_training(recipe, model, splits["train"], steps)
        tests = Trials(recipe, model, splits["test"], _count(recipe, splits["test"], is_training=False), False)
        tested = tests()
        refuse_gathering(recipe, tests)
        gathers = training.gathers or bool(tests.gathered)
        is_mixed = not (constant_loss or gathers)
        _try_results(recipe, tested, is_mixed)
        if tested.stages["predictions"] is not None:
            _try_lengths(recipe, tests, splits["test"], is_mixed)
        refuse_coupled_predictions(recipe, tests, tested)
        if recipe.settings.virtual_ranks:
            refuse_moving_buffers(recipe, tests, tested)
        _refuse_disagreement(recipe, training.totals + _totals(tested))
    finally:
        vars(recipe.share).update(alone=False, stand_in=None)
    headline = headline_of(recipe, ratios(recipe, training.names, training.totals))
    return Probed(
        training.names, headline, training.warnings, training.sample_flops, training.moving, training.changing,
        training.has_unused, gathers, is_mixed,
    )  # fmt: skip


def _try_training(recipe: Recipe, model: nn.Module, split: Split, steps: int) -> _Tried:
    """Try some samples as in a training step.

    The memory of a copy of the weights, and of their gradients, is free again when it returns.
    """
    trials = Trials(recipe, model, split, _count(recipe, split))
    with count_in_total(FlopCounterMode(display=False)) as counter:
        whole = trials()
    refuse_untrainable(recipe, model, split, trials, whole)
    whole.gradients.clear()
    before = trials.buffers
    changing = tuple(name for name, now in whole.buffers.items() if name in before and not is_same(now, before[name]))
    one = trials(0, 1)
    has_unused = _leaves_unused(trials, one) or (
        # Layers may be dropped at random
        whole.has_drawn and any(_leaves_unused(trials, trials(0, 1, seed)) for seed in range(1, SEEDS))
    )
    refuse_uneven_units(recipe, whole, one)
    refuse_unsteady(recipe, trials, whole)
    some_rates(recipe, steps)
    if recipe.settings.virtual_ranks:
        refuse_scaled_rates(recipe, trials.model, steps)
    warnings = _try_step(recipe, trials.model)
    moving = _moving(trials, model)
    warnings += [
        f"{where}: torchvision's {name} changes all samples of a batch alike, by the same random numbers: call it on "
        "each sample, in a Dataset, or draw from the argument random of augment()"
        for where, name in _changing_all(trials, whole)
    ]
    return _Tried(
        tuple(whole.pairs), _totals(whole), counter.get_total_flops() / trials.size, moving, changing,
        has_unused, bool(trials.gathered), warnings,
    )  # fmt: skip


def _changing_all(trials: Trials, whole: Trial) -> list[tuple[str, str]]:
    """Return the transforms, by place and name, that draw as often for half of the samples as for all."""
    if not whole.transforms or trials.size < 4:
        return []
    half = trials(0, trials.size // 2)
    return [one for one, times in whole.transforms.items() if half.transforms[one] == times]


def _leaves_unused(trials: Trials, trial: Trial) -> bool:
    """Return whether a trained weight has no gradient, and drop the gradients."""
    unused = any(p.requires_grad and name not in trial.gradients for name, p in trials.model.named_parameters())
    trial.gradients.clear()
    return unused


def _count(recipe: Recipe, split: Split, is_training: bool = True) -> int:
    """Return how many samples to try: two, or at most as many as a rank computes at once, which fit into memory."""
    settings = recipe.settings
    size = settings.batch_size if is_training else settings.test_batch_size
    at_once = -(-size // distributed.get_world_size())
    if is_training and recipe.micro_batch:
        at_once = min(at_once, abs(recipe.micro_batch))  # of -1 it is not known yet
    return min(SAMPLES if is_training else TEST_SAMPLES, len(split), max(2, at_once))


def _totals(trial: Trial) -> list[float]:
    """Return the sums of values and weights of each measure, alternating."""
    return [float(part.detach().double().sum()) for pair in trial.pairs.values() for part in pair]


def _refuse_disagreement(recipe: Recipe, totals: list[float]) -> None:
    """Raise InputError, on all ranks, if they measure something else for the same samples; a collective."""
    own = torch.tensor([totals], dtype=torch.float64)
    first = of_first_rank(own)
    unlike = own.shape != first.shape or not torch.allclose(own, first, rtol=1e-3, equal_nan=True)
    if any(on_any_rank([unlike], recipe.device)):
        raise InputError(
            f"{code_location(recipe, 'measure')}: each rank measures something else for the same samples: let nothing, "
            "from the initial weights to the measures, depend on the process that computes it"
        )


def _try_step(recipe: Recipe, model: nn.Module) -> list[str]:
    """Step the optimizer, which changes the weights that have a gradient from the last trial.

    Returns a warning if a checkpoint would lack a part of the optimizer.
    """
    optimizer = optimizer_of(recipe, model)
    for weight in () if is_sharded(model) else model.parameters():
        if weight.grad is not None:  # any will do: the weights themselves take no memory besides
            weight.grad = weight.detach()
    remedy = "choose one that needs no closure and takes dense gradients, such as torch.optim.AdamW"
    with _fault_named(f"{code_location(recipe, 'optimizer')}: {type(optimizer).__name__} cannot make a step", remedy):
        optimizer.step()
    if is_sharded(model):  # whose rows each rank steps on by itself, and whose state a checkpoint has in another form
        return []
    what = f"{code_location(recipe, 'optimizer')}: {type(optimizer).__name__}"
    lost = lost_on_resume(recipe, model, optimizer)
    del optimizer  # its state is as large as the network, or twice
    refuse_lost_state(recipe, model, lost)
    keeps = f"{what} keeps {listed(lost)} outside of its state_dict, and a training that is resumed goes on without"
    return [f"{keeps}: {SAVE_IT}"] if lost else []


def _moving(trials: Trials, model: nn.Module) -> frozenset[str]:
    """Return the frozen weights that change once the trained ones have: a teacher starts as a copy of these."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    if not frozen or not trials.original:
        return frozenset()
    with torch.no_grad():  # a little, where the step, which lacks schedule and clipping, may have gone anywhere
        for weight, first in zip(trials.model.parameters(), model.parameters(), strict=True):
            if weight.requires_grad:
                weight.copy_(1.01 * first + 0.01)  # those that begin as zeros, too
    trials.original = None  # the trial goes on from there
    trials()
    return frozenset(frozen & changed_weights(trials.model, model).keys())


@torch.no_grad()
def _try_results(recipe: Recipe, tested: Trial, mixed: bool) -> None:
    """Try what is made of the outputs after an epoch, and after the last one."""
    facts: Any = recipe.facts()
    if not isinstance(facts, dict):  # which the metadata of the weights could not be read with
        raise InputError(f"{code_location(recipe, 'facts')} must return a dict, got {type(facts).__name__}")
    outputs, tree, predictions = (tested.stages[stage] for stage in ("forward", "data", "predictions"))
    batch = Batch(tree, recipe.share)
    if mixed:
        what = f"{code_location(recipe, 'measure')}: fails for outputs paired with other samples, as guesses would be"
        with _fault_named(what, "define constant_loss(), the loss of guessing"):
            pairs_of(recipe, mismatched(outputs), batch)
    if predictions is not None:
        where, count = code_location(recipe, "predictions"), batch.share.count
        if not isinstance(predictions, Tensor) or predictions.shape[:1] != (count,):
            got = tuple(predictions.shape) if isinstance(predictions, Tensor) else type(predictions).__name__
            raise InputError(f"{where} must return a tensor with a row for each of the {count} samples, got {got}")
        with _fault_named(f"{where}: NumPy cannot hold what it returns", "call float() on it"):
            predictions.cpu().numpy()
    where = code_location(recipe, "pictures")
    with _fault_named(f"{where} fails, or returns no pairs of a caption and an image", "return () for none"):
        pictures = [(str(caption), picture) for caption, picture in recipe.pictures(outputs, tree)]
    for _, picture in pictures:
        if not isinstance(picture, Tensor) or picture.ndim != 3 or picture.shape[0] not in (1, 3):
            got = f"shape {tuple(picture.shape)}" if isinstance(picture, Tensor) else type(picture).__name__
            raise InputError(f"{where} must return images, tensors (C, H, W) of 1 or 3 channels, got {got}")


def _try_lengths(recipe: Recipe, tests: Trials, split: Split, mixed: bool) -> None:
    """Check that the predictions of the shortest and of the longest padded batch have rows of the same shape."""
    lengths, size = lengths_of(split), recipe.settings.test_batch_size
    if not lengths:
        return
    samples = EvaluationBatches(split, size, rank=0, world_size=1, mixed=mixed).order.at(torch.arange(len(split)))
    longest = torch.stack([batch[lengths.each[batch].argmax()] for batch in samples.split(size)])
    rows = []
    for index in (longest[lengths.each[longest].argmin()], longest[lengths.each[longest].argmax()]):
        one = Subset(split, tests.size, index.expand_as)
        trial = Trials(recipe, tests.model, one, tests.size, False, copied=tests.model)
        rows.append(trial().stages["predictions"])
    check_rows(recipe, *rows)


@contextmanager
def _fault_named(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{what} ({cause}): {remedy}") from error
