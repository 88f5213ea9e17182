"""Tries a recipe on some samples of a batch, as one rank would compute them, without the other ranks."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.batches.lengths import padded
from flyte_ddp.engine.batches.splits import Split, spread
from flyte_ddp.engine.checks.draws import Draws, host_state
from flyte_ddp.engine.global_batch.batch_norm import statistics_of
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.engine.measures import augment, code_location, pairs_of, trained_measure
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.torch_compat import copy_with_hooks, device_generator, pytree
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
        draws: how many random numbers were drawn, by place and operation, other than by sample.
        drawn: operation and shape of what was drawn by sample.
        alike: the transforms of torchvision, with their places, that drew for the whole batch at once.
        strays: the methods that drew numpy's or Python's random numbers.
        buffers: of the network, afterwards.
        weights: the sums of those that are not as they were before, by name.
        gradients: of the sum of what is trained, by parameter; none in evaluation.
    """

    count: int
    stages: dict[str, Any]
    pairs: dict[str, tuple[Tensor, Tensor]]
    draws: "Counter[tuple[str, str]]"
    drawn: list[tuple[str, tuple[int, ...]]]
    alike: list[tuple[str, str]]
    strays: list[str]
    buffers: dict[str, Tensor]
    weights: dict[str, float]
    gradients: dict[str, Tensor]


class Trials:
    """Computes samples first..last of a batch like the rank whose share they are; always from the same state.

    The whole batch, whose samples are spread over the split, is computed as by the only rank, and a part of it as by
    one of two. is_training: with augmentation and gradients; otherwise as in evaluation, with predictions.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        mode: GlobalBatchMode,
        split: Split,
        size: int,
        is_training: bool = True,
        copied: nn.Module | None = None,
    ):
        """copied: a copy of the model that other trials have made; by default another one, unless it is sharded."""
        self.recipe, self.size, self.device, self.is_training = recipe, size, split.device, is_training
        # A copy, unless it is sharded: what a trial changes in the network, such as counts of calls, is not kept
        self.model, self.mode = copied or (model if is_sharded(model) else copy_with_hooks(model)), mode
        self.original = None if is_sharded(model) else model
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.statistics: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of batch norm, by layer and call
        self.gathered: list[Tensor] = []  # what all_gather() returned for the whole batch, call by call
        # Both parts are spread over the split too, or of sorted samples each would have a class of its own; and one is
        # larger, or both might have the mean of the whole
        some, cut = spread(split, size), max(1, 3 * size // 8)
        self.parts = [(0, cut), (cut, size)] if size > 1 else []
        # Each is read by itself, since what a Dataset returns for a batch may depend on its samples
        chosen = torch.cat([some[::2], some[1::2]])
        asked = [chosen, *(chosen[first:last] for first, last in self.parts)]
        whole, *trees = (padded(split, tree, own, chosen) for tree, own in zip(split.fetch(asked), asked, strict=True))
        self.trees = {(0, size): whole, **dict(zip(self.parts, trees, strict=True))}
        if self.parts:
            self.mode.learn(self(0, size).drawn, self(*self.parts[0]).drawn, size)

    def __call__(self, first: int, last: int, as_second: bool = False) -> Trial:
        """as_second: as by the second of two ranks, even if it is the whole batch."""
        recipe, share, is_whole = self.recipe, self.recipe.share, last - first == self.size
        rank, world_size = int(as_second or first > 0), 1 if is_whole and not as_second else 2
        vars(share).update(first=first, count=last - first, size=self.size, alone=True)
        share.ghost_batch_size = recipe.ghost_batch_size if self.is_training else 0
        share.stand_in = self._note if is_whole else self._repeat(iter(self.gathered))
        share.statistics = self._batch_statistics(is_whole)
        self.gathered = [] if is_whole else self.gathered
        generator, host = device_generator(self.device), [host_state()]
        part = self.trees.get((first, last))
        if part is None:
            part = pytree.tree_map(lambda leaf: leaf[first:last], self.trees[0, self.size])
        stages = {"data": part}
        part = pytree.tree_map(torch.clone, part)  # as in training, where what a recipe changes in place is a copy, too
        with (
            _types_named(recipe, part),
            Draws() as draws,
            among_ranks(rank, world_size),
            torch.set_grad_enabled(self.is_training),
        ):
            self._start_afresh()
            if self.is_training:
                stages["augment"] = part = augment(recipe, part, 0, share)
            host.append(host_state())
            generator.manual_seed(0)
            with self.mode.block(0):
                stages["forward"] = recipe.forward(self.model, part)
                host.append(host_state())
                stages["measure"] = pairs = pairs_of(recipe, stages["forward"], Batch(part, share))
                host.append(host_state())
                if not self.is_training:
                    stages["predictions"] = recipe.predictions(stages["forward"], part)
                elif pairs[trained_measure(list(pairs))][0].requires_grad:
                    pairs[trained_measure(list(pairs))][0].sum().backward()
        methods = ("augment", "forward", "measure")
        strays = [stage for stage, before, after in zip(methods, host, host[1:], strict=False) if before != after]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        changed = changed_weights(self.model, self.original) if self.original else {}
        weights = {name: weight.sum(dtype=torch.float64).item() for name, weight in changed.items()}
        alike = [(where, operation) for where, operation in draws.counts if operation in draws.transforms]
        drawn = draws.counts, self.mode.drawn, alike
        return Trial(last - first, stages, pairs, *drawn, strays, buffers, weights, gradients)

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
        return rows

    def _batch_statistics(self, is_whole: bool) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
        """What batch norm normalises by: the whole batch, for a part of it, too, so that samples do not affect each
        other. Without any, the activations of a deep network would grow beyond all bounds."""
        calls, layers = Counter[int](), {id(buffer) for buffer in self.model.buffers()}

        def statistics(features: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            layer = layer if layer in layers else features.shape[1]  # those without buffers are told by their order
            calls[layer] += 1
            call = layer, calls[layer]
            if is_whole:
                self.statistics[call] = statistics_of(features)
            return self.statistics.get(call) or statistics_of(features)

        return statistics

    def _repeat(self, noted: Iterator[Tensor]) -> Any:
        return lambda rows: next(noted, rows).detach()


def changed_weights(model: nn.Module, original: nn.Module) -> dict[str, Tensor]:
    """By name, with every name of tied ones, the network's parameters that are not as in the original."""
    before = dict(original.named_parameters(remove_duplicate=False))
    now = {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}
    return {name: weight for name, weight in now.items() if not is_same(weight, before[name])}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, but for those of a NaN, which equals no other to torch."""
    return torch.equal(one, other) or (one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True))


@contextmanager
def _types_named(recipe: Recipe, batch: Tree) -> Iterator[None]:
    """What numpy computes is float64, embeddings are often float16, pictures uint8: layers take none of them."""
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


@contextmanager
def among_ranks(rank: int, size: int) -> Iterator[None]:
    """While the block runs, torch.distributed and torchrun's variables say that this is that rank of so many."""
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
    """The ranks' process group, but of another rank and size; whatever is exchanged goes through the real one."""

    def __init__(self, group: Any, rank: int, size: int):
        self._group, self.rank, self.size = group, lambda: rank, lambda: size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
