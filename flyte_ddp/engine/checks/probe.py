"""Checks a recipe before training: does its result depend on how many ranks share a batch?

A few samples are computed whole and in two parts, as by one rank and by two. Whatever differs, or draws random numbers
of its own, is reported with its place in the recipe and with what to write instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.batches.splits import Part, Split, spread
from flyte_ddp.engine.checks.comparison import dependences, optimizer_of, scaled_rates
from flyte_ddp.engine.checks.data_probe import of_first_rank, on_any_rank, unequal_data
from flyte_ddp.engine.checks.trials import Trial, Trials, changed_weights
from flyte_ddp.engine.global_batch.by_row import ByRow
from flyte_ddp.engine.measures import code_location, headline_of, mismatched, pairs_of, ratios, trained_measure
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.torch_compat import count_in_total
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe

MORE_SAMPLES, PART = 1024, 64  # how many samples are looked through for gradients, and how many at a time
SAMPLES, TEST_SAMPLES = 8, 32  # that are computed: as in a training step, and without gradients as in evaluation
REMEDY = "docs/your-own-model.md has an example of each. If it is meant, set may_depend_on_ranks = True in the recipe"


@dataclass(frozen=True)
class Probed:
    """What probing a recipe has found.

    Attributes:
        names: of the measures.
        headline: the name of the main measure.
        reasons: why the result depends on the number of ranks; only if the recipe allows that.
        alike: what changes all samples of a batch alike, where one would rather change each.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        rows: what draws by row, having seen where samples are in what is drawn.
        moving: the weights, by name, that are not trained but changed otherwise, such as a teacher's.
    """

    names: tuple[str, ...]
    headline: str
    reasons: list[str]
    alike: list[str]
    sample_flops: float
    rows: ByRow
    moving: frozenset[str]


class _Tried(NamedTuple):
    """As Probed has them; totals: the sums of values and weights of each measure, alternating."""

    reasons: list[str]
    names: tuple[str, ...]
    totals: list[float]
    sample_flops: float
    moving: frozenset[str]
    alike: list[str]


def probe(recipe: Recipe, model: nn.Module, splits: dict[str, Split], steps: int, mixed: bool) -> Probed:
    """Raises InputError, with place and remedy, for whatever makes the result depend on the number of ranks, and for
    what would fail in the first step, or only after an epoch.

    A collective. splits: by name; those that are computed are "train" and "test". steps: of the whole training. mixed:
    whether evaluation pairs outputs with other samples.

    The order matters:
    1. The data, since nothing can be learned by comparing what ranks compute from other samples.
    2. The whole batch, and what it shows by itself: a recipe that cannot train is told so, rather than that its parts
       differ.
    3. Its parts (dependences), from the weights that training starts with.
    4. A step of the optimizer, which changes the weights of the trial; so what compares comes before it, and what asks
       which weights follow the trained ones (_moving) after it.
    5. The test samples in a trial of their own, which starts from the weights of the network again.
    6. What ranks disagree about, which takes all of them: an InputError above is raised by each rank for itself, and
       one that comes here alone would wait for the others until it is told of their failure.
    """
    reasons, rows = unequal_data(recipe, splits), ByRow(recipe.share)
    try:
        training = _try_training(recipe, model, splits["train"], rows, steps)
        reasons = reasons or training.reasons  # what differs from the start is found again wherever it goes
        tests = Trials(recipe, model, rows, splits["test"], _count(recipe, splits["test"], is_training=False), False)
        tested = tests(0, tests.size)
        _try_results(recipe, tested, mixed)
        reasons = reasons or dependences(recipe, tests, tested)
        disagreement = _disagreement(recipe, training.totals + _totals(tested))
    finally:
        vars(recipe.share).update(alone=False, stand_in=None, statistics=None)
    reasons = reasons or disagreement
    if reasons and not recipe.may_depend_on_ranks:
        raise InputError(f"the result would depend on the number of ranks: {'; '.join(reasons)}. {REMEDY}")
    headline = headline_of(recipe, ratios(recipe, training.names, training.totals))
    return Probed(training.names, headline, reasons, training.alike, training.sample_flops, rows, training.moving)


def _try_training(recipe: Recipe, model: nn.Module, split: Split, rows: ByRow, steps: int) -> _Tried:
    """Some samples as in a training step. What it takes, a copy of the weights and their gradients, is free again when
    it returns."""
    trials = Trials(recipe, model, rows, split, _count(recipe, split))
    with count_in_total(FlopCounterMode(display=False)) as counter:
        whole = trials(0, trials.size)
    _refuse_micro_batch(recipe, rows)
    _refuse_lost(recipe, trials, whole)
    _refuse_without_gradients(recipe, whole)
    if not is_sharded(trials.model):
        _refuse_reentrant(recipe, whole)
    _refuse_unreached(recipe, model, split, trials, whole)
    if trials.everyones and not recipe.couples_samples:
        raise InputError(
            f"{code_location(recipe, 'measure')}: a recipe that calls everyone() needs couples_samples = True"
        )
    reasons = dependences(recipe, trials, whole) or scaled_rates(recipe, trials.model, steps)
    _try_step(recipe, trials.model)
    moving = _moving(trials, model)
    alike = [
        f"{where}: torchvision's {name} changes all samples of a batch alike, by the same random numbers: call it on "
        "each sample, in a Dataset, or draw from the argument random of augment()"
        for where, name in whole.alike
    ]
    return _Tried(reasons, tuple(whole.pairs), _totals(whole), counter.get_total_flops() / trials.size, moving, alike)


def _count(recipe: Recipe, split: Split, is_training: bool = True) -> int:
    """How many samples to compute; not more, apart from two, than a rank computes at once, which fits into memory."""
    settings = recipe.settings
    size = settings.batch_size if is_training else settings.test_batch_size
    at_once = -(-size // distributed.get_world_size())
    if is_training and recipe.micro_batch:
        at_once = min(at_once, abs(recipe.micro_batch))  # of -1 it is not known yet
    return min(SAMPLES if is_training else TEST_SAMPLES, len(split), max(2, at_once))


def _totals(trial: Trial) -> list[float]:
    """The sums of values and weights of each measure, alternating."""
    return [float(part.detach().double().sum()) for pair in trial.pairs.values() for part in pair]


def _disagreement(recipe: Recipe, totals: list[float]) -> list[str]:
    """Whether the ranks measure the same for the same samples; a collective."""
    mine = torch.tensor([totals], dtype=torch.float64)
    first = of_first_rank(mine)
    unlike = mine.shape != first.shape or not torch.allclose(mine, first, rtol=1e-3, equal_nan=True)
    if not any(on_any_rank([unlike], recipe.device)):
        return []
    remedy = "let nothing, from the initial weights to the measures, depend on the process that computes it"
    return [f"{code_location(recipe, 'measure')}: each rank measures something else for the same samples: {remedy}"]


# --- what is never trained ---


def _refuse_micro_batch(recipe: Recipe, rows: ByRow) -> None:
    if not recipe.micro_batch:
        return
    why = ""
    if rows.normalised and not recipe.norm_samples:
        why = "with batch norm, whose statistics are those of whole batches (or set norm_samples, or use nn.GroupNorm)"
    elif recipe.couples_samples:
        why = "with couples_samples, which needs whole batches"
    if why:
        raise InputError(f"{type(recipe).__name__}.micro_batch must be 0 {why}, got {recipe.micro_batch}")


def _refuse_lost(recipe: Recipe, trials: Trials, whole: Trial) -> None:
    """What no file can have, buffers that a step changes and a checkpoint lacks, and those that it creates and that
    model() has no place for."""
    kept = trials.model.state_dict()
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{code_location(recipe, 'model')}: its state_dict must have nothing but tensors, got {name} "
                f"({type(value).__name__}): let get_extra_state() return a tensor, or leave it out"
            )
    for name, now in whole.buffers.items():
        before = trials.buffers.get(name)
        is_same = before is not None and torch.equal(now, before)
        is_fitting = before is not None and now.shape == before.shape
        if is_same or is_fitting == (name in kept):  # a cache that grows is made again
            continue
        owner = type(trials.model.get_submodule(name.rpartition(".")[0])).__name__
        does, remedy = "creates", "of which model() has none of this shape: create it in its __init__"
        if is_fitting:
            does, remedy = "changes", "which no checkpoint has: register it with persistent=True"
        raise InputError(f"{code_location(recipe, 'model')}: forward {does} the buffer {name} of {owner}, {remedy}")


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
    """Its parameters would get gradients twice in a step, which DistributedDataParallel takes for an error."""
    seen, ahead = set(), [whole.pairs[trained_measure(list(whole.pairs))][0].grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise InputError(
                f"{code_location(recipe, 'forward')}: torch.utils.checkpoint must have use_reentrant=False: change it, "
                "or name the layers in the recipe's recompute"
            )
        seen.add(node)
        ahead += [function for function, _ in node.next_functions]


def _refuse_unreached(recipe: Recipe, model: nn.Module, split: Split, trials: Trials, whole: Trial) -> None:
    """A few samples need not reach every expert of a network: only what many more do not reach either is refused."""
    trainable = [name for name, parameter in trials.model.named_parameters() if parameter.requires_grad]
    unreached = [name for name in trainable if name not in whole.gradients]
    some = spread(split, min(MORE_SAMPLES, len(split)))
    for chosen in some.split(PART):
        if not unreached:
            return
        part = Part(split, len(chosen), chosen.__getitem__)
        found = Trials(recipe, model, trials.rows, part, len(part), copied=trials.model)(0, len(part))
        unreached = [name for name in unreached if name not in found.gradients]
    if unreached:
        named = ", ".join(unreached[:3]) + (f" and {len(unreached) - 3} more" if len(unreached) > 3 else "")
        raise InputError(
            f"{code_location(recipe, 'forward')}: no gradient reaches the parameters {named} from {len(some)} "
            "samples: use them, remove them, or call requires_grad_(False) on them in model()"
        )


def _try_step(recipe: Recipe, model: nn.Module) -> None:
    """A step of the optimizer with gradients for what has some from the last trial, which changes the weights."""
    optimizer = optimizer_of(recipe, model)
    for weight in () if is_sharded(model) else model.parameters():
        if weight.grad is not None:  # any will do: the weights themselves take no memory besides
            weight.grad = weight.detach()
    remedy = "choose one that needs no closure and takes dense gradients, such as torch.optim.AdamW"
    with _fault_named(f"{code_location(recipe, 'optimizer')}: {type(optimizer).__name__} cannot make a step", remedy):
        optimizer.step()


def _moving(trials: Trials, model: nn.Module) -> frozenset[str]:
    """The frozen weights that change once those that are trained have: a teacher starts as a copy of these."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    if not frozen or not trials.original:
        return frozenset()
    with torch.no_grad():  # a little, where the step, which lacks schedule and clipping, may have gone anywhere
        for weight, first in zip(trials.model.parameters(), model.parameters(), strict=True):
            if weight.requires_grad:
                weight.copy_(1.01 * first)
    trials.original = None  # the trial goes on from there
    trials(0, trials.size)
    return frozenset(frozen & changed_weights(trials.model, model).keys())


@torch.no_grad()
def _try_results(recipe: Recipe, tested: Trial, mixed: bool) -> None:
    """What becomes of outputs after an epoch, and after the last one."""
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
        if picture.ndim != 3 or picture.shape[0] not in (1, 3):
            raise InputError(
                f"{where} must return images (C, H, W) of 1 or 3 channels, got shape {tuple(picture.shape)}"
            )


@contextmanager
def _fault_named(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{what} ({cause}): {remedy}") from error
