"""Keeps torch's compiler out of ranks that do not compile."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def leave_dynamo_out() -> None:
    """Puts a stand-in in the place of torch._dynamo, unless it is there already.

    DistributedDataParallel and torch.optim import torch._dynamo only to tell it to leave them alone. That import takes
    longer than torch's own (3.6 s after 2.7 s on two EPYC cores, torch 2.15) and every rank would wait for it.
    The stand-in answers what those two ask; whoever asks for more gets the real module.
    """
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _Dynamo("torch._dynamo")


class _Dynamo(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
        return function if function is not None else lambda wrapped: wrapped

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the import system, which wants a path before a submodule
            raise AttributeError(name)
        if sys.modules.get("torch._dynamo") is self:
            del sys.modules["torch._dynamo"], torch._dynamo  # its own parts look for it in both places
        torch._dynamo = importlib.import_module("torch._dynamo")
        return getattr(torch._dynamo, name)
