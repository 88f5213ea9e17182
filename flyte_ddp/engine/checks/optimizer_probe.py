"""Checks of a recipe's optimizer before training: a step, its rates, and state that no checkpoint would have."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from flyte_ddp.engine.checkpoints.checkpoint import check_readable
from flyte_ddp.engine.checks.trials import as_input_error, is_same
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.digest import compute_sum
from flyte_ddp.engine.measures import finite_number
from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.engine.sharding.sharding import OFF, is_sharded, update_own_rows
from flyte_ddp.engine.torch_compat import guard_steps, move_towards, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import is_out_of_memory
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import explain_error, listed

SAVE_IT = "keep it in its state or param_groups, or add it to state_dict() and load_state_dict()"
# How many numbers are stepped on twice, and how many of a state are copied: megabytes and milliseconds, however large
# the network is
MOST_NUMBERS = 1 << 18
MOST_STATE = 1 << 24
# Steps before the state is saved, and after. An optimizer that looks ahead does so every few steps, and has only its
# weights then, so the first number is a multiple of no usual interval.
STEPS = 7, 10
MANY = 1 << 14  # numbers of a tensor that is stepped on whole and cut: some in 10,000 may be rounded otherwise
PIECE = 7  # numbers of a piece of a tensor that is cut: fewer than a processor treats at a time


def try_optimizer(recipe: Recipe, model: nn.Module, steps: int) -> list[str]:
    """Check that the recipe's optimizer and schedule can step, and that a resumed training would lose nothing.

    The optimizer's steps change weights and gradients, and the checks seed the global random generators. A sharded
    network's optimizer makes one step only, and its state is not checked. With virtual ranks, the optimizer and the
    schedule must not depend on the rank or the number of ranks.

    Args:
        recipe: the recipe.
        model: a copy of the network, or the sharded network itself, with gradients of a trial step.
        steps: the number of steps of the whole training.

    Returns:
        A list with one warning if the optimizer keeps numbers outside its state_dict but resumes with the same bits.
        Otherwise an empty list.

    Raises:
        InputError: The optimizer or the schedule cannot be used, or a resumed training would end with other bits.
    """
    _some_rates(recipe, steps)
    if recipe.settings.virtual_ranks:
        _refuse_scaled_rates(recipe, model, steps)
    optimizer = _build_optimizer(recipe, model)
    is_whole = not is_sharded(model)
    what = f"{code_location(recipe, 'optimizer')}: {type(optimizer).__name__}"
    for weight in model.parameters():
        if is_whole and weight.grad is not None:
            weight.grad = weight.detach()  # any gradient will do; the weights themselves take no extra memory
    remedy = "choose one that needs no closure and takes dense gradients, such as torch.optim.AdamW"
    with as_input_error(f"{what} cannot make a step", remedy):
        optimizer.step()
    if not is_whole and recipe.settings.virtual_ranks:
        _refuse_uneven_rounding(recipe, optimizer, what)
    if not is_whole:  # each rank steps its own rows, and a checkpoint has the optimizer's state in another form
        return []
    try:
        check_readable({"optimizer": optimizer.state_dict()})
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    places = {weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None and weight.numel()}
    state = pytree.tree_leaves([*optimizer.state.values()])
    if any(isinstance(leaf, Tensor) and leaf.data_ptr() in places for leaf in state):
        raise InputError(
            f"{what} keeps a gradient itself in its state, and the next step uses the same memory: keep a copy, such "
            "as weight.grad.clone()"
        )
    lost = _lost_on_resume(recipe, model, optimizer)
    del optimizer  # its state is as large as the network, or twice as large
    _refuse_lost_state(recipe, model, what, lost)
    if not lost:
        return []
    keeps = f"{what} keeps {listed(lost)} outside of its state_dict, and a training that is resumed goes on without"
    return [f"{keeps}: {SAVE_IT}"]


def _refuse_uneven_rounding(recipe: Recipe, optimizer: Optimizer, what: str) -> None:
    """Raise InputError if sharding would change the bits of an optimizer's steps, or of the average of the weights.

    Sharding cuts a tensor into pieces, and kernels may round the last numbers of each piece in another way, as fused
    Adam does on a CPU. So new optimizers of the same class and options step random numbers, whole and in pieces, and
    both results must be equal. `optimizer` itself makes no step. The moving average of the weights is checked only if
    the recipe has an ema_decay.

    Args:
        recipe: the recipe, for its device and ema_decay.
        optimizer: an optimizer of torch.optim that treats each number by itself.
        what: the optimizer's place and class, for the message.
    """
    generator = torch.Generator().manual_seed(0)
    numbers, *gradients = torch.randn(5, MANY, generator=generator).to(recipe.device)
    # Of all sizes, so that small rates, too, show how they are rounded
    numbers *= torch.exp2(-(torch.arange(MANY, device=recipe.device) % 29.0))
    both = numbers.clone(), numbers.clone()
    for moved, size in zip(both, (len(numbers), PIECE), strict=True):
        move_towards([*moved.split(size)], [*gradients[0].split(size)], 0.1)  # as the average of the weights
    if recipe.ema_decay and not torch.equal(*both):
        raise InputError(
            f"{type(recipe).__name__}.ema_decay must be 0 with virtual_ranks and sharding together on this processor, "
            f"which rounds some numbers of a tensor otherwise where it is cut, got {recipe.ema_decay}: set it so, {OFF}"
        )
    # Groups may have many rates, such as one for each layer, which are rounded alike
    kinds = {repr({**group, "params": 0, "lr": 0, "weight_decay": 0}): group for group in optimizer.param_groups}
    for group in kinds.values():
        options = {**group, "params": []}
        whole, cut = (_step_on(type(optimizer), options, numbers, gradients, size) for size in (len(numbers), PIECE))
        if not torch.equal(whole, cut):
            remedy = "leave out fused=True" if group.get("fused") else "choose another one"
            raise InputError(
                f"{what} rounds some numbers of a tensor otherwise where it is cut, on this processor, so that with "
                f"virtual_ranks sharding would change the result: {remedy}, {OFF}"
            )


def _step_on(kind: Any, options: dict[str, Any], numbers: Tensor, gradients: list[Tensor], size: int) -> Tensor:
    """Cut numbers into pieces, step the pieces with a new optimizer, and return the numbers and the state.

    Args:
        kind: the optimizer's class.
        options: the hyperparameters of its group.
        numbers: (N,) the parameter before the first step; it is not changed.
        gradients: a gradient (N,) for each step.
        size: the length of a piece; the last one may be shorter.

    Returns:
        (k, N): the numbers after the last step, then the tensors of the optimizer's state that are not scalars.
    """
    pieces = [nn.Parameter(piece.clone()) for piece in numbers.split(size)]
    stepped = kind([{**options, "params": pieces}])
    guard_steps(stepped, torch.zeros_like(numbers[0]), torch.full_like(numbers[0], 3.0))  # as in a training
    for gradient in gradients:
        for piece, own in zip(pieces, gradient.split(size), strict=True):
            piece.grad = own.clone()
        stepped.step()
    by_piece = ([piece.detach(), *stepped.state[piece].values()] for piece in pieces)
    kept = ([each for each in values if isinstance(each, Tensor) and each.ndim] for values in by_piece)
    return torch.cat([torch.stack(values) for values in kept], 1)


def numbers_outside_state(optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return the numbers in an optimizer's own attributes, which its state_dict may lack.

    The attributes state, param_groups and defaults are skipped, and so are private ones. Numbers in dicts, lists and
    tuples count, those in other objects don't. A bool does not count as a number.

    Returns:
        A dict from the name of each attribute with numbers to a list of these numbers, with a digest in place of each
        tensor.
    """
    found = {}
    for name, value in vars(optimizer).items():
        if name.startswith("_") or name in ("state", "param_groups", "defaults"):
            continue
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Tensor, int, float))]
        numbers = [leaf for leaf in leaves if not isinstance(leaf, bool)]
        if numbers:
            found[name] = [compute_sum(one.detach()).item() if isinstance(one, Tensor) else one for one in numbers]
    return found


def _build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return a new optimizer of the recipe.

    The optimizer of a sharded network steps only the rows of this rank.

    Raises:
        InputError: optimizer() returned something other than an Optimizer, or an Optimizer with a scheduler of torch
            attached.
    """
    optimizer = recipe.optimizer(model)
    where = code_location(recipe, "optimizer")
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"{where} must return one optimizer of torch.optim, got {type(optimizer).__name__}: parameters that are to "
            "be treated differently are groups of one optimizer"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InputError(
            f"{where} must return an optimizer without a scheduler of torch, got one: nothing calls its step(), so "
            "that rates stay as it begins, which may be 0; let lr_lambda(step, steps) return what multiplies the rate"
        )
    return update_own_rows(optimizer)


def _some_rates(recipe: Recipe, steps: int) -> list[float]:
    """Return what lr_lambda() returns for the first two steps, the middle one and the last one of `steps`."""
    return [finite_number(recipe, "lr_lambda", step, steps) for step in sorted({0, 1, steps // 2, steps - 1})]


def _refuse_scaled_rates(recipe: Recipe, model: nn.Module, steps: int) -> None:
    """Raise InputError if optimizer() or lr_lambda() depends on the rank or the number of ranks.

    Both methods are called as on a single rank, and again as on rank 1 of 2, with the same seeds. The hyperparameters
    of the optimizer's groups and some of the schedule's factors must be equal.
    """
    results = []
    for rank, world_size in ((0, 1), (1, 2)):
        seed_all(0)  # rates may be drawn
        with _as_rank(rank, world_size):
            groups = [_plain(group) for group in _build_optimizer(recipe, model).param_groups]
            results.append({"optimizer": groups, "lr_lambda": _some_rates(recipe, steps)})
    one, two = results
    for method in one:
        if one[method] != two[method]:
            raise InputError(
                f"{code_location(recipe, method)}: with virtual_ranks what it returns must not depend on the rank or "
                "the number of ranks: read neither, since batch_size is that of all ranks together"
            )


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that are numbers, flags, texts, tuples or tensors, these as lists."""
    kinds = (bool, int, float, str, tuple, Tensor)
    options = {name: value for name, value in group.items() if isinstance(value, kinds)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}


@contextmanager
def _as_rank(rank: int, size: int) -> Iterator[None]:
    """Make the code in the block see another rank and world size; a context manager.

    torch.distributed returns these. So do the variables RANK and WORLD_SIZE, if they were set before; LOCAL_RANK stays.
    Collectives still go through the real group.
    """
    groups: Any = distributed.group  # the type checker would insist on a group's own class
    group = groups.WORLD
    before = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    now = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        groups.WORLD = _Group(group, rank, size)
        os.environ.update({name: now[name] for name in before})
        yield
    finally:
        groups.WORLD = group
        os.environ.update(before)


class _Group:
    """The ranks' process group with another rank and size. All exchanges go through the real group."""

    def __init__(self, group: Any, rank: int, size: int):
        self._group = group
        self.rank = lambda: rank
        self.size = lambda: size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _lost_on_resume(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the attributes of an optimizer that its state_dict does not restore in a new optimizer, sorted by name.

    The optimizer has made a step. An attribute counts if it has numbers, and if the new optimizer lacks it, or has
    other numbers there after loading the state_dict.
    """
    kept = numbers_outside_state(optimizer)
    if not kept:  # torch's own optimizers keep nothing there, so their state need not be copied
        return []
    restored = _build_optimizer(recipe, model)
    restored.load_state_dict(optimizer.state_dict())
    found = numbers_outside_state(restored)
    return sorted(name for name, values in kept.items() if values != found.get(name))


def _refuse_lost_state(recipe: Recipe, model: nn.Module, what: str, lost: Sequence[str]) -> None:
    """Raise InputError if an optimizer that has loaded its state_dict continues with other bits than without a break.

    One optimizer makes STEPS[0] steps. Its state is copied, and it makes STEPS[1] more. A second optimizer loads the
    copy and repeats these last steps from the same weights. The check changes weights and gradients, and seeds the
    global random generators.

    Only weights that have a gradient are stepped. In a large network they are the smallest ones, with at most
    MOST_NUMBERS numbers together. Nothing is checked if the state has more than MOST_STATE numbers, since memory may be
    short, or if the optimizer cannot step these few weights alone.

    Args:
        recipe: the recipe.
        model: the network, which is not sharded, with the gradients of a step.
        what: the optimizer's place and class, for the message.
        lost: the attributes that a state_dict does not restore, for the message.
    """
    with_gradient = sorted((one for one in model.parameters() if one.grad is not None), key=Tensor.numel)
    model.zero_grad()
    numbers = accumulate(weight.numel() for weight in with_gradient)
    weights = [weight for weight, count in zip(with_gradient, numbers, strict=True) if count <= MOST_NUMBERS]
    gradients = [weight.detach() + 0.01 for weight in weights]  # some weights begin as zeros
    first = _build_optimizer(recipe, model)
    try:
        _step(first, STEPS[0], weights, gradients)
        state = first.state_dict()
        if sum(leaf.numel() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)) > MOST_STATE:
            return
        state = pytree.tree_map_only(Tensor, Tensor.clone, state)
        before = [weight.detach().clone() for weight in weights]
        _step(first, STEPS[1], weights, gradients)
    except Exception:
        if len(weights) == len(with_gradient):
            raise
        return  # this optimizer needs a gradient for every weight, and the state of all may not fit into memory
    expected = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
    resumed = _build_optimizer(recipe, model)
    try:
        resumed.load_state_dict(state)
        _step(resumed, STEPS[1], weights, gradients)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{what} cannot go on from its own state_dict ({explain_error(error)}), so that no training could be "
            "resumed: let load_state_dict() take what state_dict() returns"
        ) from error
    if not all(map(is_same, weights, expected)):
        keeps = listed(lost) or "something, such as the optimizer that it holds,"
        raise InputError(
            f"{what} keeps {keeps} outside of its state_dict, so that a training that is resumed ends with other bits: "
            f"{SAVE_IT}"
        )


def _step(optimizer: Optimizer, count: int, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Make `count` steps, each by these gradients of these weights, drawing the same random numbers at each call."""
    seed_all(count)
    for _ in range(count):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()  # a step may change the gradient, for instance by clipping
        optimizer.step()
