"""Trials of a recipe: some samples, computed as one rank would compute them, without the other ranks."""

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flyte_ddp
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.code.code_version import is_installed
from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.measures import augment, compute_pairs, trained_measure
from flyte_ddp.engine.seeds import seed_part
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.torch_compat import (
    TorchDispatchMode,
    any_batch_size,
    copy_with_hooks,
    may_round_to_tf32,
    name_arguments,
    pytree,
)
from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import is_out_of_memory
from flyte_ddp.recipe import Recipe, Tree
from flyte_ddp.text import explain_error, listed

# The tolerance is relative, and at least eight roundings of the coarsest dtype. It can't be zero: for other numbers of
# rows libraries choose other kernels, which add in another order.
TOLERANCE, ROUNDINGS = 1e-3, 8
SIZES = 1 << 16  # how many numbers of a tensor are sorted by size
# Types that no layer of float32 takes, with patterns of their names in torch's errors
UNFIT = {torch.float64: r"\bdouble\b", torch.float16: r"\bhalf\b", torch.uint8: r"\b(byte|unsigned char)\b"}
TRANSFORMS = "torchvision.transforms"  # the module's name, because ranks that don't use it should not import it
OURS = str(Path(flyte_ddp.__path__[0], "engine"))


class Network:
    """A network on trial. Each trial begins with the weights and buffers of the network that is to be trained.

    Attributes:
        model: a copy of that network, since other changes by a trial, such as a count of calls, can't be put back. A
            sharded network can't be copied, so it is tried itself, and its weights are not put back.
        buffers: copies of the buffers before any trial, by name.
    """

    def __init__(self, model: nn.Module):
        self.is_sharded = is_sharded(model)
        self.model = model if self.is_sharded else copy_with_hooks(model)
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._original = model
        self._names = self._weight_names()

    @torch.no_grad()
    def start_afresh(self, is_training: bool, is_moved: bool) -> None:
        """Restore the original weights and buffers, remove the gradients, and set the mode, before a trial.

        A sharded network's weights are not restored, and neither are buffers whose shape has changed.

        Args:
            is_training: whether to set training mode, or else evaluation mode.
            is_moved: whether to give the weights that require a gradient other values than the original ones, as a step
                would.
        """
        self.model.train(is_training).zero_grad()
        if not self.is_sharded:
            for weight, first in zip(self.model.parameters(), self._original.parameters(), strict=True):
                # An optimizer without schedule and clipping may go anywhere. Weights that are 0 must move, too.
                weight.copy_(1.01 * first + 0.01 if is_moved and weight.requires_grad else first)
        for name, buffer in self.model.named_buffers():
            if name in self.buffers and buffer.shape == self.buffers[name].shape:
                buffer.copy_(self.buffers[name])

    def weights_unlike_original(self) -> list[str]:
        """Return the names of the weights that differ from the original network's after the last trial.

        A tied weight is listed under each of its names. After a trial with is_moved, all trained weights are listed,
        because the trial gives them other values. For a sharded network the list is empty.
        """
        before = dict(self._original.named_parameters(remove_duplicate=False))
        now = {} if self.is_sharded else dict(self.model.named_parameters(remove_duplicate=False))
        return [name for name, weight in now.items() if not is_same(weight.detach(), before[name])]

    def late_weights(self) -> list[str]:
        """Return the names of the weights that the trials have created or removed."""
        return sorted(self._names ^ self._weight_names())

    def _weight_names(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def changed_buffers(self) -> tuple[str, ...]:
        """Return the names of the buffers that the last trial has changed, or removed."""
        now = dict(self.model.named_buffers())
        return tuple(name for name, first in self.buffers.items() if name not in now or not is_same(now[name], first))

    def unreached(self) -> list[str]:
        """Return the names of the trained weights that have no gradient from the last trial."""
        weights = self.model.named_parameters()
        return [name for name, weight in weights if weight.requires_grad and weight.grad is None]

    def with_owner(self, name: str) -> str:
        """Return a text such as 'norm.running_mean of BatchNorm1d', from the name of a weight or buffer."""
        return f"{name} of {type(self.model.get_submodule(name.rpartition('.')[0])).__name__}"


@dataclass
class Trial:
    """The outcome of computing some samples once.

    Attributes:
        stages: what each method of the recipe returned, by the method's name, such as "forward".
        pairs: values and weights of each measure, (samples,) each.
        has_drawn: whether torch, Python's random or NumPy drew random numbers.
        transforms: how often each transform of torchvision drew, by the place that calls it and its class's name.
        units: the names of the sharded layers, in the order of their calls.
        moved: the names of the frozen weights that calls of sharded layers have changed.
    """

    stages: dict[str, Any] = field(default_factory=dict)
    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    has_drawn: bool = False
    transforms: "Counter[tuple[str, str]]" = field(default_factory=Counter)
    units: list[str] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)

    @property
    def trained(self) -> tuple[str, Tensor, Tensor]:
        """Return the name, values and weights of the measure that is trained."""
        name = trained_measure(list(self.pairs))
        return name, *self.pairs[name]


class Trials:
    """Trials of a recipe on some samples, each from the same state. Call the object to run one.

    Attributes:
        tree: the samples.
        size: the number of samples.
        whole: the outcome of the last trial of all samples.
        gathered: each call of all_gather() in that trial: the method that called it, and the rows.
    """

    whole: Trial

    def __init__(self, recipe: Recipe, network: Network, split: Split, chosen: Tensor, is_training: bool = True):
        """Fetch the chosen samples, (size,) int64 indices in the split, and pad them as a batch of these samples.

        In training, trials have augmentation and gradients, and no predictions.
        """
        self.recipe = recipe
        self.network = network
        self.size = len(chosen)
        self.is_training = is_training
        self.gathered: list[tuple[str, Tensor]] = []
        (self.tree,) = split.fetch([chosen])
        if lengths := get_lengths(split):
            self.tree = lengths.padded(self.tree, chosen, chosen)

    def __call__(self, first: int = 0, last: int | None = None, seed: int = 0, is_moved: bool = False) -> Trial:
        """Compute samples first..last, by default all of them, without the other ranks.

        In training the samples go through augment(), forward(), measure() and a backward pass, which leaves the
        gradients in the network. In evaluation they go through forward(), measure() and predictions(). all_gather()
        returns the rows of all samples, which a trial of a part has from the last trial of all.

        Args:
            first: the first sample.
            last: the sample to stop before; None is the end.
            seed: the seed of what is drawn.
            is_moved: whether the trained weights get other values, as after a step.

        Raises:
            InputError: The trial has created or removed a weight. Other errors are those of the recipe.
        """
        last = self.size if last is None else last
        recipe = self.recipe
        model = self.network.model
        trial = Trial()
        recipe.share = share = BatchShare(first, last - first, self.size, alone=True)
        is_whole = last - first == self.size
        of_whole = iter(self.gathered)
        self.gathered = [] if is_whole else self.gathered

        def run(method: str, function: Any, *arguments: Any) -> Any:
            def gather(rows: Tensor) -> Tensor:
                if not is_whole:
                    return next(of_whole, ("", rows))[1].detach()
                self.gathered.append((method, rows))
                return rows

            share.stand_in = gather
            trial.stages[method] = function(*arguments)
            return trial.stages[method]

        # A recipe may change its samples in place: in training, too, it gets copies
        tree = pytree.tree_map(lambda leaf: leaf[first:last].clone(), self.tree)
        with (
            naming_wrong_dtype(recipe, tree),
            _Draws(trial),
            torch.set_grad_enabled(self.is_training),
            recording_units(model, trial),
        ):
            self.network.start_afresh(self.is_training, is_moved)
            if self.is_training:
                tree = run("augment", augment, recipe, tree, seed, share)
            seed_part(seed, 0)
            before = host_state()
            with any_batch_size():
                outputs = run("forward", recipe.forward, model, tree)
                trial.has_drawn |= host_state() != before
                trial.pairs = run("measure", compute_pairs, recipe, outputs, Batch(tree, share))
                _, values, _ = trial.trained
                if not self.is_training:
                    run("predictions", recipe.predictions, outputs, tree)
                elif values.requires_grad:
                    values.sum().backward()
        if late := self.network.late_weights():
            raise InputError(
                f"{code_location(recipe, 'model')}: forward creates or removes the weights {listed(late)}, of which "
                "no optimizer and no checkpoint would know: create all weights in its __init__"
            )
        if is_whole and not seed:
            self.whole = trial
        return trial


@contextmanager
def recording_units(model: nn.Module, trial: Trial) -> Iterator[None]:
    """Record the sharded layers that are called in the block, and the frozen weights that these calls change.

    Use this as a context manager. Each call of a layer appends the layer's name to trial.units. The names of the
    changed weights are added to trial.moved. Without sharding, nothing is recorded.

    Args:
        model: the network.
        trial: the trial that is changed.
    """
    before: dict[str, dict[str, tuple[Tensor, int]]] = {}

    def frozen(name: str) -> dict[str, tuple[Tensor, int]]:
        weights = model.get_submodule(name).named_parameters(name)
        return {key: (weight, torch_compat.version(weight)) for key, weight in weights if not weight.requires_grad}

    def called(name: str) -> None:
        trial.units.append(name)
        before[name] = frozen(name)

    def returned(name: str) -> None:  # before torch cuts the weights again
        for key, (weight, version) in frozen(name).items():
            earlier, earlier_version = before[name][key]
            if weight is earlier and version != earlier_version:
                trial.moved.add(key)

    with ExitStack() as hooks:
        for name, unit in model.named_modules():
            if is_sharded(unit):
                hooks.callback(unit.register_forward_pre_hook(lambda *_, name=name: called(name)).remove)
                hooks.callback(unit.register_forward_hook(lambda *_, name=name: returned(name), prepend=True).remove)
        yield


@contextmanager
def naming_wrong_dtype(recipe: Recipe, batch: Tree) -> Iterator[None]:
    """Replace a RuntimeError of torch about a dtype by an InputError with the shape of the tensor to convert.

    Use this as a context manager. Weights are float32, but NumPy computes in float64, and pictures are uint8. Other
    errors of the block are passed on unchanged.

    Args:
        recipe: the recipe, for the message.
        batch: the tensors of the batch, of which one may have the wrong dtype.
    """
    try:
        yield
    except RuntimeError as error:
        for leaf in pytree.tree_leaves(batch):
            if leaf.dtype in UNFIT and re.search(UNFIT[leaf.dtype], str(error), re.IGNORECASE):
                raise InputError(
                    f"{code_location(recipe, 'data')}: what has the shape {tuple(leaf.shape)} in a batch is "
                    f"{str(leaf.dtype).removeprefix('torch.')}, but the weights are float32 ({explain_error(error)}): "
                    'convert it, by .float() or .astype("float32")'
                ) from error
        raise


@contextmanager
def as_input_error(what: str, remedy: str) -> Iterator[None]:
    """Replace any Exception in the block by an InputError "{what} ({type and first line of the error}): {remedy}".

    Use this as a context manager. An InputError of the block is replaced, too. An error about too little memory is
    passed on unchanged.

    Args:
        what: what has failed, for the message.
        remedy: what the user can do, for the message.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{what} ({cause}): {remedy}") from error


# --- random numbers ---


def host_state() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's random number generators, which change when something draws."""
    state: Any = np.random.get_state()
    _, keys, *rest = state
    return random.getstate(), keys.tobytes(), *rest


class _Draws(TorchDispatchMode):
    """A block in which the trial notes what draws random numbers by torch."""

    supports_higher_order_operators = True

    def __init__(self, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = trial

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _really_draws(func, args, kwargs):
            self.trial.has_drawn = True
            self.trial.transforms.update(_calling_transform())
        return func(*args, **kwargs)


def _calling_transform() -> list[tuple[str, str]]:
    """Find the transform of torchvision that is running, by the frames of the call stack.

    Returns:
        A list with one pair: the text 'file, line n' of the user's code that has called the transform, or 'the network'
            if there is none; and the name of the innermost transform's class. An empty list if no transform is running.
    """
    frame = sys._getframe(1)
    place = ""
    name = ""
    while frame:
        file = frame.f_code.co_filename
        kind = type(frame.f_locals.get("self"))
        if not name and kind.__module__.startswith(TRANSFORMS):
            name = kind.__name__
        if not place and not file.startswith((OURS, "<")) and not is_installed(file):
            place = f"{file}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return [(place or "the network", name)] if name else []


def _really_draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of one of torch's random operations really draws random numbers.

    With a dropout of 0 or in evaluation mode it draws none, as the call's arguments tell. Attention and recurrent
    layers call such operations even then.

    Args:
        func: the operation.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    arguments = name_arguments(func, args, kwargs)
    probability = next((arguments[name] for name in ("dropout_p", "dropout", "p") if name in arguments), 1.0)
    is_training = next((arguments[name] for name in ("train", "training") if name in arguments), True)
    is_possible = isinstance(probability, Tensor) or bool(probability)  # bernoulli_() takes a tensor of probabilities
    return is_possible and is_training is not False


# --- comparison ---


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype and bits; a NaN is the same as any other NaN."""
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and (torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True))


def choose_tolerance(model: nn.Module) -> float:
    """Return the relative difference that is allowed between numbers that should be the same."""
    steps = [torch.finfo(weight.dtype).eps for weight in model.parameters() if weight.is_floating_point()]
    if may_round_to_tf32() and any(weight.is_cuda for weight in model.parameters()):
        steps.append(2.0**-10)
    return max([TOLERANCE, *(ROUNDINGS * step for step in steps)])


@torch.no_grad()  # with gradients, torch may refuse a view of a weight that has changed since
def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two tensors have the same shape and nearly the same numbers.

    Two numbers may differ by tolerance * (|y| + s). Here y is the second tensor's number, and s is the lower quartile
    of the first tensor's absolute values, which helps numbers near 0 that are the difference of two large ones.
    Integers must be equal. NaN equals NaN.

    Args:
        one: the first tensor.
        other: the second tensor.
        tolerance: the relative tolerance. A tolerance below a few roundings of the first tensor's dtype is raised to
            that.
    """
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = max(tolerance, ROUNDINGS * torch.finfo(one.dtype).eps)
    return torch.allclose(one, other.to(one.dtype), tolerance, tolerance * _measure_size(one), equal_nan=True)


def _measure_size(numbers: Tensor) -> float:
    """Return the lower quartile of the absolute values of the numbers; 0 if there are none.

    Numbers that are 0, infinite or NaN are left out, because they may stand for a mask. Of a large tensor, only a part
    of the numbers is looked at.
    """
    sizes = numbers.detach().abs().flatten()
    sizes = sizes[:: max(1, len(sizes) // SIZES)].double()
    sizes = sizes[sizes.isfinite() & (sizes > 0)].sort().values
    return sizes[len(sizes) // 4].item() if len(sizes) else 0.0
