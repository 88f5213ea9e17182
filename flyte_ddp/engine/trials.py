"""Tries a recipe on some samples of a batch, as one rank would compute them, without the other ranks."""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from flyte_ddp.engine.batches import Batch, device_generator
from flyte_ddp.engine.by_row import ByRow
from flyte_ddp.engine.draws import Draws, host_state
from flyte_ddp.engine.measures import augment, pairs_of
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.recipe import Recipe

STAGES = ("augment", "forward", "measure")


@dataclass(frozen=True)
class Trial:
    """The outcome for some samples.

    Attributes:
        stages: what each method of the recipe returned, by name.
        pairs: values and weights of each measure.
        draws: how many random numbers were drawn, by place and operation, other than by row.
        drawn: operation and shape of what was drawn by row.
        strays: the methods that drew numpy's or Python's random numbers.
        buffers: of the network, afterwards.
    """

    stages: Dict[str, Any]
    pairs: Dict[str, Tuple[Tensor, Tensor]]
    draws: "Counter[Tuple[str, str]]"
    drawn: List[Tuple[str, Tuple[int, ...]]]
    strays: List[str]
    buffers: Dict[str, Tensor]


class Trials:
    """Computes samples first..last of a batch like the rank whose share they are; always from the same state."""

    def __init__(self, recipe: Recipe, model: nn.Module, tree: Any):
        # A copy: what a trial changes in the network, such as counts of calls, is not kept
        self.recipe, self.tree = recipe, tree
        self.model, self.rows = copy.deepcopy(model).train(), ByRow(recipe.share)
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.size = len(pytree.tree_leaves(tree)[0])
        self.device = pytree.tree_leaves(tree)[0].device
        self.everyones: List[Tensor] = []  # what everyone() returned for the whole batch, call by call
        if self.size > 1:
            drawn = [self(0, last).drawn for last in (self.size, self.size // 2)]
            self.rows.learn(*drawn, self.size)

    def __call__(self, first: int, last: int) -> Trial:
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
            part = augment(recipe, part, 0, share)
            host.append(host_state())
            generator.manual_seed(0)
            with self.rows.block(0):
                outputs = recipe.forward(self.model, part)
                host.append(host_state())
                pairs = pairs_of(recipe, outputs, Batch(part, share))
                host.append(host_state())
        strays = [stage for stage, before, after in zip(STAGES, host, host[1:], strict=False) if before != after]
        stages = {"augment": part, "forward": outputs, "measure": pairs}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return Trial(stages, pairs, draws.found, self.rows.drawn, strays, buffers)

    def _note(self, mine: Tensor) -> Tensor:
        self.everyones.append(mine)
        return mine

    def _repeat(self, noted: Iterator[Tensor]) -> Any:
        return lambda mine: next(noted, mine).detach()
