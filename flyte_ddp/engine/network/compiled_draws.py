"""A backend of torch.compile, for code that draws: compiled, it draws what it would draw otherwise.

The numbers of a draw follow from its key and from where the rank's samples begin, which change from step to step. So a
graph that draws gets these as one more input, and torch compiles the arithmetic together with what is around it.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import checkpoint

from flyte_ddp.engine.checks.draws import Draws
from flyte_ddp.engine.global_batch.operators import FACTORIES, active
from flyte_ddp.engine.global_batch.positions import Draw, Trace
from flyte_ddp.engine.torch_compat import TorchDispatchMode
from flyte_ddp.engine.tracing_compat import (
    compiled_by,
    is_tracing,
    length_of,
    lengths_in,
    run_without_content,
    with_input,
)

COMPILER = "inductor"


def compile_by_position(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What torch.compile calls with a graph and its inputs. What cannot be compiled by position stays as it is."""
    mode, devices = active(), [one.device for one in inputs if isinstance(one, Tensor)]
    _replace(graph)
    if mode is None or not devices:  # outside of a block, torch's own numbers would be compiled in
        return graph
    device = next((one for one in devices if one.type == "cuda"), devices[0])
    try:
        mode.trace = Trace()
        with Draws() as others:
            run_without_content(graph, inputs)
        draws, mode.trace = mode.trace.draws, Trace()
        if others.counts:  # whose numbers would no longer come between those of the draws
            return graph
        no_positions = torch.zeros(1 + len(draws), dtype=torch.int64, device=device)
        changed = with_input(graph, inputs, no_positions, _begin) if draws else (graph, inputs)
        compiled = compiled_by(COMPILER, *changed)
        if len(mode.trace.draws) > len(draws):  # a backward pass draws, too
            return graph
    finally:
        mode.trace = None
    if not draws:
        return compiled
    count, lengths = mode.share.count, lengths_in(inputs)

    @lru_cache(maxsize=1000)
    def draws_of(*values: int) -> list[Draw]:
        known = dict(zip(lengths.values(), values, strict=True))
        return [draw.with_lengths(partial(length_of, known)) for draw in draws]

    def call(*arguments: Any) -> Any:
        if is_tracing():  # by DistributedDataParallel, whose buckets end a graph: for shapes alone
            return compiled(*arguments, no_positions)
        if active() is not mode or mode.share.count != count:  # other samples in tensors of the same shapes
            return graph(*arguments)
        keys = mode.keys(draws_of(*(arguments[place] for place in lengths)))
        positions = torch.cat([torch.tensor([mode.share.first]), keys])
        if device.type == "cuda":
            positions = positions.pin_memory()  # only from there nobody waits for the copy
        return compiled(*arguments, positions.to(device, non_blocking=True))

    return call


@has_side_effect
def _begin(positions: Tensor) -> None:
    """The graph's first operation, each time that it is traced."""
    mode = active()
    assert mode
    mode.trace = Trace(positions)


def _replace(graph: GraphModule) -> None:
    """What makes a tensor is seen by no operator of torch while it traces, so it is replaced in the graph."""
    for part in graph.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                node.target = MADE.get(node.target, node.target)
            part.recompile()


def _made_by(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        with _Factories():  # type: ignore[no-untyped-call]
            return factory(*args, **kwargs)

    return made


class _Factories(TorchDispatchMode):
    """Has what makes a tensor replaced, while torch traces, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode, replacement = active(), FACTORIES.get(func.name().removeprefix("aten::"))
        call = partial(replacement, mode) if mode and replacement else func
        return call(*args, **kwargs or {})


def _checkpoint(part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Of a graph that is not compiled, in which torch's own would not draw the same numbers again."""
    if is_tracing():
        return CHECKPOINT(part, *args, **kwargs)
    return checkpoint(part, *args, **{**kwargs, "use_reentrant": False})


FUNCTIONS = torch.rand, torch.randn, torch.randint, torch.normal, torch.rand_like, torch.randn_like, torch.randint_like
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
MADE = {function: _made_by(function) for function in FUNCTIONS} | {CHECKPOINT: _checkpoint}
