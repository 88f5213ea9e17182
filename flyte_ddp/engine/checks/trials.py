"""A recipe, tried on some samples of a batch as one rank would compute them, without the other ranks."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.batches.splits import Split, spread
from flyte_ddp.engine.checks.draws import Draws
from flyte_ddp.engine.measures import augment, code_location, pairs_of, trained_measure
from flyte_ddp.engine.seeds import seed_part
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.torch_compat import any_batch_size, copy_with_hooks, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe, Tree
from flyte_ddp.text import reason_of

# Types that no layer of float32 takes, by what torch calls them then
UNFIT = {torch.float64: r"\bdouble\b", torch.float16: r"\bhalf\b", torch.uint8: r"\b(byte|unsigned char)\b"}


@dataclass(frozen=True)
class Trial:
    """The outcome for some samples.

    Attributes:
        count: of the samples.
        stages: what each method of the recipe was given ("data") and returned, by name.
        pairs: values and weights of each measure.
        has_drawn: whether torch drew random numbers.
        transforms: how often each of torchvision's transforms drew, by place and name.
        buffers: of the network, afterwards.
        changed: the names of the weights that are not as they were before.
        gradients: of the sum of what is trained, by parameter; none in evaluation.
        units: the names of the sharded layers, in the order of their calls.
    """

    count: int
    stages: dict[str, Any]
    pairs: dict[str, tuple[Tensor, Tensor]]
    has_drawn: bool
    transforms: "Counter[tuple[str, str]]"
    buffers: dict[str, Tensor]
    changed: list[str]
    gradients: dict[str, Tensor]
    units: list[str]


class Trials:
    """Trials of samples that are spread over a split, each from the same state, without the other ranks.

    is_training: with augmentation and gradients; otherwise as in evaluation, with predictions.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        split: Split,
        size: int,
        is_training: bool = True,
        copied: nn.Module | None = None,
    ):
        """copied: a copy of the model that other trials have made; by default another one, unless it is sharded."""
        self.recipe, self.size, self.device, self.is_training = recipe, size, split.device, is_training
        # A copy, unless it is sharded: what a trial changes in the network, such as counts of calls, is not kept
        self.model = copied or (model if is_sharded(model) else copy_with_hooks(model))
        self.original = None if is_sharded(model) else model
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.gathered: list[Tensor] = []  # what all_gather() returned for the whole batch, call by call
        self.gathering = dict[str, None]()  # the methods that called it, by name, in their order
        self._method = ""
        # Parts are spread over the split, too, or of sorted samples each would have a class of its own
        some = spread(split, size)
        (self.tree,) = split.fetch([torch.cat([some[::2], some[1::2]])])

    def __call__(self, first: int = 0, last: int | None = None, seed: int = 0) -> Trial:
        """Compute samples first..last, by default the whole batch. seed: of what is drawn."""
        last = self.size if last is None else last
        recipe, share, is_whole = self.recipe, self.recipe.share, last - first == self.size
        vars(share).update(first=first, count=last - first, size=self.size, part=0, borrowed=False, alone=True)
        share.stand_in = self._note if is_whole else self._repeat(iter(self.gathered))
        self.gathered = [] if is_whole else self.gathered
        stages = {"data": pytree.tree_map(lambda leaf: leaf[first:last], self.tree)}
        # As in training, where what a recipe changes in place is a copy, too
        part = pytree.tree_map(torch.clone, stages["data"])
        with (
            _types_named(recipe, part),
            Draws() as draws,
            torch.set_grad_enabled(self.is_training),
            _noting_units(self.model) as units,
        ):
            self._start_afresh()
            self._method = "augment"
            if self.is_training:
                stages["augment"] = part = augment(recipe, part, seed, share)
            seed_part(seed, 0)
            with any_batch_size():
                self._method = "forward"
                stages["forward"] = recipe.forward(self.model, part)
                self._method = "measure"
                stages["measure"] = pairs = pairs_of(recipe, stages["forward"], Batch(part, share))
                self._method = "predictions"
                if not self.is_training:
                    stages["predictions"] = recipe.predictions(stages["forward"], part)
                elif pairs[trained_measure(list(pairs))][0].requires_grad:
                    pairs[trained_measure(list(pairs))][0].sum().backward()
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        changed = [*changed_weights(self.model, self.original)] if self.original else []
        count, transforms = last - first, draws.transforms
        return Trial(count, stages, pairs, draws.has_drawn, transforms, buffers, changed, gradients, units)

    def _start_afresh(self) -> None:
        self.model.train(self.is_training).zero_grad()
        with torch.no_grad():
            if self.original:
                for weight, first in zip(self.model.parameters(), self.original.parameters(), strict=True):
                    weight.copy_(first)
            for name, buffer in self.model.named_buffers():
                if name in self.buffers and buffer.shape == self.buffers[name].shape:
                    buffer.copy_(self.buffers[name])

    def _note(self, rows: Tensor) -> Tensor:
        self.gathered.append(rows)
        self.gathering[self._method] = None
        return rows

    def _repeat(self, noted: Iterator[Tensor]) -> Any:
        return lambda rows: next(noted, rows).detach()


def changed_weights(model: nn.Module, original: nn.Module) -> dict[str, Tensor]:
    """Return the network's parameters that differ from the original, by each of their names."""
    before = dict(original.named_parameters(remove_duplicate=False))
    now = {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}
    return {name: weight for name, weight in now.items() if not is_same(weight, before[name])}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits; a NaN is the same as any other NaN."""
    return torch.equal(one, other) or (one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True))


@contextmanager
def _noting_units(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the sharded layers that are called within the block."""
    called: list[str] = []
    with ExitStack() as hooks:
        for name, unit in model.named_modules():
            if is_sharded(unit):
                hooks.callback(unit.register_forward_pre_hook(lambda *_, name=name: called.append(name)).remove)
        yield called


@contextmanager
def _types_named(recipe: Recipe, batch: Tree) -> Iterator[None]:
    """Name a type of the batch that layers don't take: NumPy computes float64, pictures are uint8."""
    try:
        yield
    except RuntimeError as error:
        for leaf in pytree.tree_leaves(batch):
            if leaf.dtype in UNFIT and re.search(UNFIT[leaf.dtype], str(error), re.IGNORECASE):
                raise InputError(
                    f"{code_location(recipe, 'data')}: what has the shape {tuple(leaf.shape)} in a batch is "
                    f"{str(leaf.dtype).removeprefix('torch.')}, but the weights are float32 ({reason_of(error)}): "
                    'convert it, by .float() or .astype("float32")'
                ) from error
        raise
