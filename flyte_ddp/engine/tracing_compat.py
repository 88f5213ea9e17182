"""The private parts of torch's compiler that this package uses, as of version 2.15.0: see tests/compat.

What traces a network gives its graph to a backend, with tensors that have shapes alone, some of whose lengths may have
any value.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule


def uncompiled(module: Any) -> Any:
    """The network that torch.compile has been given, of what it has returned; anything else as it is."""
    return getattr(module, "_orig_mod", module)


def records_graphs(module: nn.Module) -> bool:
    """Whether torch compiles it, its calls or its forward into CUDA graphs, as in the mode reduce-overhead."""
    compiled = module, module._compiled_call_impl, vars(module).get("forward")
    asked = [getattr(one, "__dict__", {}).get("get_compiler_config") for one in compiled]
    return any(ask is not None and (ask() or {}).get("triton.cudagraphs") for ask in asked)


def leave_uncompiled(function: Any) -> None:
    """Has torch.compile leave calls of a function as they are, and all that it calls.

    torch.compiler.disable is public, but imports torch._dynamo, see leave_dynamo_out.
    """
    dynamo = torch._C._dynamo.eval_frame
    skipped = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, skipped)


def allow_compiling(times: int) -> None:
    """Lets torch.compile compile the same code so often: past its own limit it would leave it as it is. How it does
    that, it decides without measuring, or the same step would round otherwise after another start."""
    config, torch._inductor.config.deterministic = torch._dynamo.config, True
    config.recompile_limit = max(config.recompile_limit, times)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, times)


def is_tracing() -> bool:
    """Whether torch compiles, so that tensors have shapes alone."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_functionalizing() -> bool:
    """Whether it traces what a compiler will get; before that it looks for shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def compiled_by(name: str, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What torch's compiler of that name makes of a graph."""
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend(name)(graph, inputs)
    return compiled


def run_without_content(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """Calls the graph that torch.compile gives to a backend, with tensors that have the inputs' shapes alone."""
    mode = _fake_mode(inputs)
    with torch.no_grad(), mode:  # hooks for what a backward pass needs would count these tensors
        graph(*(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in inputs))


def with_input(
    graph: GraphModule, inputs: Sequence[Any], like: Tensor, use: Callable[[Tensor], None]
) -> tuple[GraphModule, list[Any]]:
    """Such a graph, and its inputs, with another one, the last, and a call of a function with it before all others."""
    changed = deepcopy(graph.graph)
    with changed.inserting_after(changed.find_nodes(op="placeholder")[-1]):
        added = changed.placeholder("positions")
    with changed.inserting_after(added):
        changed.call_function(use, (added,))
    return GraphModule(graph, changed), [*inputs, _fake_mode(inputs).from_tensor(like)]


def _fake_mode(inputs: Sequence[Any]) -> Any:
    return torch._guards.detect_fake_mode(inputs)


def lengths_in(inputs: Sequence[Any]) -> dict[int, Any]:
    """Which inputs of such a graph are lengths that may have any value, and what stands for them in others."""
    return {number: one.node.expr for number, one in enumerate(inputs) if isinstance(one, torch.SymInt)}


def divided(length: int, count: int) -> int:
    """length // count; a length that may have any value in such a graph is fixed, unless it is a multiple anyway."""
    each = length // count
    if isinstance(each, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return each if statically_known_true(length % count == 0) else int(each)
    return each


def length_of(known: dict[Any, int], length: int) -> int:
    """What a length is that follows from known ones."""
    return int(length.node.expr.xreplace(known)) if isinstance(length, torch.SymInt) else length
