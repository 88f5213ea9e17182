"""The probe of a recipe before training, which finds out whether it can be trained, saved, resumed and evaluated.

A few samples are computed as in a training step, and a few as in evaluation. Whatever would fail, or be lost by a
resume, is reported with its place in the recipe and with what to write instead. `probe` tries, in this order:

1. the data: all ranks have the same samples, and the same each time (data_probe.py);
2. a training step: a checkpoint has all that it changes, and a gradient reaches each trained weight;
3. the step of a single sample, and the same step again, which must return the same;
4. the optimizer and the schedule: a step, and a resume (optimizer_probe.py);
5. transforms that change all samples alike, and weights that are not trained, but follow those that are;
6. an evaluation (evaluation_probe.py);
7. all ranks, which must have measured the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batches.splits import Split, spread
from flyte_ddp.engine.checks.data_probe import find_unequal_data, refuse_coupled_reading
from flyte_ddp.engine.checks.evaluation_probe import try_evaluation
from flyte_ddp.engine.checks.optimizer_probe import try_optimizer
from flyte_ddp.engine.checks.trials import Network, Trial, Trials, choose_tolerance, is_close, is_same
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.collectives import all_reduce_flags, broadcast_value
from flyte_ddp.engine.measures import compute_ratios, find_headline, sum_measures
from flyte_ddp.engine.sharding.sharding import OFF
from flyte_ddp.engine.torch_compat import count_in_total, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed

SEEDS = 8  # so many seeds may show that a layer is dropped at random
SAMPLES, TEST_SAMPLES = 8, 32  # numbers of samples: for a training step, and for an evaluation without gradients
MORE_SAMPLES, PART = 1024, 64  # how many samples are looked through for gradients, and how many at a time


@dataclass(frozen=True)
class Probed:
    """The findings of probing a recipe.

    Attributes:
        names: the names of the measures.
        headline: the name of the main measure.
        warnings: what is hardly meant, such as what changes all samples of a batch alike, or state that a resume loses.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        moving: the weights, by name, that are not trained but changed otherwise, such as a teacher's.
        changing: the buffers, by name, that a forward pass changes.
        has_unused: whether a sample leaves trained weights unused, such as an expert's.
        gathers: whether the recipe calls all_gather(), in training or in evaluation.
        is_mixed: whether evaluation pairs outputs with other samples, too, because the loss of guessing is unknown.
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


def probe(recipe: Recipe, model: nn.Module, splits: dict[str, Split], steps: int, constant_loss: float) -> Probed:
    """Compute a few samples of a recipe in training and in evaluation, to find its faults early; a collective.

    The network keeps its weights and buffers, unless it is sharded: then the trials change it, and the caller has to
    restore it.

    Args:
        recipe: the recipe. Its `share` is replaced by a new BatchShare at the end.
        model: the network, on the rank's device.
        splits: the samples, by the name of the split; "train" and "test" must be there. Some samples of these two are
            computed; other splits are only read and compared between ranks.
        steps: the number of steps of the whole training, for lr_lambda.
        constant_loss: the loss of guessing; 0 if it is unknown.

    Returns:
        The measures, the main one, warnings for the user, the floating-point operations of a sample, what forward
        passes change, and which features the recipe uses.

    Raises:
        InputError: The recipe would fail in the first step or after an epoch, or the ranks have different data. The
            message names the place and the remedy.
    """
    if reasons := find_unequal_data(code_location(recipe, "data"), splits):
        raise InputError(f"all ranks must have the same samples each time: {'; '.join(reasons)}")
    for split in splits.values() if recipe.settings.virtual_ranks else ():
        refuse_coupled_reading(recipe, split)
    network = Network(model)
    try:
        training = Trials(recipe, network, splits["train"], _choose(recipe, splits["train"]))
        with count_in_total(FlopCounterMode(display=False)) as counter:
            training()
        names = tuple(training.whole.pairs)
        totals = sum_measures(training.whole.pairs).tolist()
        changing = network.changed_buffers()
        sample_flops = counter.get_total_flops() / training.size
        _refuse_gathering(training)
        _refuse_lost_buffers(training)
        _refuse_changed_weights(training)
        _refuse_missing_gradients(training)
        _refuse_reentrant(training)
        _refuse_unreached(training, splits["train"])

        one = training(0, 1)
        has_unused = _has_unused(training)
        _refuse_uneven_units(training, one)
        _refuse_unsteady(training)

        warnings = try_optimizer(recipe, network.model, steps)  # with the gradients of the last trial
        warnings += _find_alike(training)
        moving = _find_moving(training)
        gathers = bool(training.gathered)
        del training, one  # the evaluation needs their memory

        evaluation = Trials(recipe, network, splits["test"], _choose(recipe, splits["test"], False), False)
        evaluation()
        _refuse_gathering(evaluation)
        gathers = gathers or bool(evaluation.gathered)
        is_mixed = not (constant_loss or gathers)
        try_evaluation(evaluation, splits["test"], is_mixed)
        _refuse_disagreement(recipe, totals + sum_measures(evaluation.whole.pairs).tolist())
    finally:
        recipe.share = BatchShare()
    headline = find_headline(recipe, compute_ratios(recipe, names, totals))
    return Probed(names, headline, warnings, sample_flops, moving, changing, has_unused, gathers, is_mixed)


def _choose(recipe: Recipe, split: Split, is_training: bool = True) -> Tensor:
    """Choose the samples for a trial training step or a trial evaluation, and return their indices, (samples,) int64.

    At most SAMPLES are chosen for training, or TEST_SAMPLES for evaluation. No more are chosen than a rank computes at
    once, because more might not fit into memory, but at least two if the split has two. The first half of the indices
    is spread over the whole split, and so is the second half.
    """
    settings = recipe.settings
    size = settings.batch_size if is_training else settings.test_batch_size
    at_once = -(-size // distributed.get_world_size())
    if is_training and recipe.micro_batch:
        at_once = min(at_once, abs(recipe.micro_batch))  # the number for -1 is not known yet
    some = spread(split, min(SAMPLES if is_training else TEST_SAMPLES, len(split), max(2, at_once)))
    return torch.cat([some[::2], some[1::2]])  # of sorted samples, each half would have classes of its own


def _refuse_gathering(trials: Trials) -> None:
    """Raise InputError if the recipe called all_gather() in the trial of all samples, and may not do so.

    With virtual ranks, only measure() may call all_gather(). With sharding, no method may. With micro_batch, which
    computes a rank's share in pieces, no method may call it in training.
    """
    recipe = trials.recipe
    if not trials.gathered:
        return
    others = [method for method, _ in trials.gathered if method != "measure"]
    if recipe.settings.virtual_ranks and others:
        raise InputError(
            f"{code_location(recipe, others[0])}: with virtual_ranks all_gather() must be called in measure() alone, "
            "as the network is computed part by part: gather there what it returns, or set virtual_ranks to 0"
        )
    where = f"for {type(recipe).__name__}, which calls all_gather()"
    if recipe.micro_batch and trials.is_training:
        raise InputError(f"micro_batch must be 0 {where}, got {recipe.micro_batch}: set it to 0")
    if trials.network.is_sharded:
        raise InputError(f"options.sharding must be off {where}: leave it out")


def _refuse_lost_buffers(training: Trials) -> None:
    """Raise InputError if a resume would lose a buffer of the network, or if the state_dict has anything but tensors.

    Two kinds of buffers are refused:

    - a buffer with persistent=False whose values a step has changed. One that a step creates or reshapes is accepted:
      it is a cache, which is made again;
    - a buffer in the state_dict that a step has created, or whose shape or dtype it has changed.

    Buffers that a step removes are not noticed, and neither are tensors in plain attributes.
    """
    recipe, network = training.recipe, training.network
    kept = network.model.state_dict()
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{code_location(recipe, 'model')}: its state_dict must have nothing but tensors, got {name} "
                f"({type(value).__name__}): let get_extra_state() return a tensor, or leave it out"
            )
    for name, now in network.model.named_buffers():
        before = network.buffers.get(name)
        is_fitting = before is not None and (now.shape, now.dtype) == (before.shape, before.dtype)
        if is_fitting == (name in kept) or (before is not None and is_same(now, before)):
            continue  # a cache that grows is fine, too, because it is made again
        does, remedy = "creates", "of which model() has none of this shape and dtype: create it in its __init__"
        if is_fitting:
            does, remedy = "changes", "which no checkpoint has: register it with persistent=True"
        raise InputError(
            f"{code_location(recipe, 'model')}: forward {does} the buffer {network.with_owner(name)}, {remedy}"
        )


def _refuse_changed_weights(training: Trials) -> None:
    """Raise InputError if a forward pass itself has changed a trained weight, as nn.Embedding does with max_norm.

    Each rank would change the weight by its own samples, so the ranks' networks would differ. With sharding, a change
    of a frozen weight is refused instead: a sharded layer has whole weights only during its call, so the change would
    be lost.
    """
    recipe, network = training.recipe, training.network
    if moved := training.whole.moved:
        raise InputError(
            f"{code_location(recipe, 'forward')}: with sharding it must leave frozen weights as they are, because they "
            f"are whole only during the call, and it changes {listed(sorted(moved))}: leave them, {OFF}"
        )
    for name in network.weights_unlike_original():
        if network.model.get_parameter(name).requires_grad:
            raise InputError(
                f"{code_location(recipe, 'forward')}: it changes {network.with_owner(name)} by the samples of its "
                "rank: change no trained weights there; of nn.Embedding, leave out max_norm"
            )


def _refuse_missing_gradients(training: Trials) -> None:
    """Raise InputError if the measure that is minimised, usually the loss, has no usable gradient.

    Refused are values that require no gradient, sample weights that require one, and a sparse gradient of a parameter.
    Nothing is computed: the function looks at what the trial of a step has left.
    """
    recipe = training.recipe
    name, values, weights = training.whole.trained
    where = code_location(recipe, "measure")
    if not values.requires_grad:
        raise InputError(
            f"{where}: no gradient comes from {name!r}: compute it with torch from outputs, without detach(), argmax() "
            "or no_grad(), and leave some parameters trainable"
        )
    if weights.requires_grad:
        raise InputError(
            f"{where}: the weights of {name!r} must not need a gradient, since only its values are differentiated: "
            "call detach() on them"
        )
    for name, weight in training.network.model.named_parameters():
        if weight.grad is not None and weight.grad.layout != torch.strided:
            raise InputError(
                f"{code_location(recipe, 'model')}: the gradient of {name} must not be sparse: create its layer with "
                "sparse=False"
            )


def _refuse_reentrant(training: Trials) -> None:
    """Raise InputError if a forward pass used torch.utils.checkpoint with use_reentrant=True.

    DistributedDataParallel would raise an error, because a parameter would get its gradient twice in a step. Nothing is
    checked under sharding.
    """
    _, values, _ = training.whole.trained
    seen = set()
    ahead = [] if training.network.is_sharded else [values.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise InputError(
                f"{code_location(training.recipe, 'forward')}: torch.utils.checkpoint must have use_reentrant=False: "
                "change it, or name the layers in the recipe's activation_checkpointing"
            )
        seen.add(node)
        ahead += [function for function, _ in node.next_functions]


def _refuse_unreached(training: Trials, split: Split) -> None:
    """Raise InputError if a trained parameter gets no gradient (None, not 0) from up to MORE_SAMPLES samples.

    A few samples need not reach every parameter: only some reach a certain expert. So more samples are tried, PART at a
    time, until each parameter has had a gradient. Afterwards the network has the gradients of the last of these trials.

    Args:
        training: the trials of the training. Call this function right after one of them: its gradients count, too.
        split: the training split.
    """
    recipe, network = training.recipe, training.network
    unreached = {*network.unreached()}
    some = spread(split, min(MORE_SAMPLES, len(split)))
    for seed, chosen in enumerate(some.split(PART), 1):
        if unreached:
            Trials(recipe, network, split, chosen)(seed=seed)
            unreached.intersection_update(network.unreached())
    if unreached:
        names = [name for name in network.unreached() if name in unreached]
        raise InputError(
            f"{code_location(recipe, 'forward')}: no gradient reaches the parameters {listed(names)} from "
            f"{len(some)} samples: use them, remove them, or call requires_grad_(False) on them in model(); if "
            "torch.utils.checkpoint computes them, give it use_reentrant=False"
        )


def _has_unused(training: Trials) -> bool:
    """Return whether a step on a single sample leaves a trained weight without a gradient.

    Call it right after training(0, 1), the trial of one sample with seed 0, whose gradients are looked at first. If the
    trial of all samples has drawn random numbers, other seeds are tried, until a weight has no gradient: SEEDS in all.
    """
    for seed in range(1, SEEDS if training.whole.has_drawn else 1):
        if training.network.unreached():
            break
        training(0, 1, seed)
    return bool(training.network.unreached())


def _refuse_uneven_units(training: Trials, one: Trial) -> None:
    """Raise InputError if one sample calls other sharded layers than all samples do, or in another order.

    Each call of a layer in fsdp_units gathers its weights from all ranks. If ranks called different layers, they would
    mix up the layers' rows without an error. Without sharding nothing is refused. `one` is the trial of one sample.
    """
    recipe, units = training.recipe, training.whole.units
    if one.units != units:
        some = sorted({*one.units} ^ {*units}) or units
        raise InputError(
            f"{code_location(recipe, 'forward')}: with sharding it must call the layers that "
            f"{type(recipe).__name__}.fsdp_units names alike for all samples, and does not so call {listed(some)}: "
            f"name a layer that holds them all, {OFF}"
        )


def _refuse_unsteady(training: Trials) -> None:
    """Raise InputError if a method of the recipe returns other values when the same trial step is computed again.

    A checkpoint lacks what makes such a method differ, so a resumed training would end with other bits. Differences as
    small as roundings are allowed. Tensors without dimensions, and tensors whose shape has changed, are not compared.
    """
    whole = training.whole
    again = training()
    tolerance = choose_tolerance(training.network.model)
    for stage, returned in whole.stages.items():
        leaves, others = (pytree.tree_leaves(tree) for tree in (returned, again.stages[stage]))
        for leaf, other in zip(leaves, others, strict=False):
            is_compared = isinstance(leaf, Tensor) and isinstance(other, Tensor) and leaf.ndim
            if is_compared and leaf.shape == other.shape and not is_close(leaf, other, tolerance):
                raise InputError(
                    f"{code_location(training.recipe, stage)}: returns something else each time, so that no training "
                    "could be resumed: draw from torch.rand, numpy.random or random, whose generators each step "
                    "seeds, and count in a buffer"
                )


def _find_moving(training: Trials) -> frozenset[str]:
    """Return the names of the frozen weights that a forward pass changes, such as those of a teacher.

    A teacher follows the trained weights and starts as their copy, so a first pass may leave it as it is. This function
    therefore runs a trial in which the trained weights have other values. The set is empty without frozen weights, and
    always under sharding.
    """
    weights = training.network.model.named_parameters(remove_duplicate=False)
    frozen = frozenset(name for name, weight in weights if not weight.requires_grad)
    if not frozen or training.network.is_sharded:
        return frozenset()
    training(is_moved=True)
    return frozen.intersection(training.network.weights_unlike_original())


def _find_alike(training: Trials) -> list[str]:
    """Return a warning for each transform of torchvision that changes all samples of a batch by the same numbers.

    A trial of half of the samples is run. A transform is reported if it draws random numbers as often for half of the
    samples as for all. With fewer than 4 samples the list is empty.
    """
    whole = training.whole
    if not whole.transforms or training.size < 4:
        return []
    half = training(0, training.size // 2)
    return [
        f"{where}: torchvision's {name} changes all samples of a batch alike, by the same random numbers: call it on "
        "each sample, in a Dataset, or draw from the argument random of augment()"
        for (where, name), times in whole.transforms.items()
        if half.transforms[where, name] == times
    ]


def _refuse_disagreement(recipe: Recipe, totals: list[float]) -> None:
    """Raise InputError on all ranks if any rank's totals differ from rank 0's; a collective.

    A relative difference of 0.001 is allowed.

    Args:
        recipe: the recipe, for the message and the device.
        totals: the sums of the measures that this rank has computed. All ranks have computed the same samples.
    """
    own = torch.tensor([totals], dtype=torch.float64)
    first = broadcast_value(own)
    unlike = own.shape != first.shape or not torch.allclose(own, first, rtol=1e-3, equal_nan=True)
    if any(all_reduce_flags([unlike], recipe.device)):
        raise InputError(
            f"{code_location(recipe, 'measure')}: each rank measures something else for the same samples: let nothing, "
            "from the initial weights to the measures, depend on the process that computes it"
        )
