"""Private parts of torch's compiler, and a stand-in for it where nothing is compiled; as of version 2.15.0."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn


def defer_dynamo_import() -> None:
    """Replace torch._dynamo by a stand-in that imports the real module when it is needed.

    Importing the real module takes longer than importing torch (3.6 s after 2.7 s on two EPYC cores, torch 2.15). The
    stand-in has what DistributedDataParallel, torch.optim, torch.utils.checkpoint and FSDP use where nothing is
    compiled. The first use of any other attribute imports the real module. If torch._dynamo is imported already,
    nothing changes.
    """
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _Dynamo("torch._dynamo")
        sys.modules["torch._dynamo.utils"] = _Dynamo.utils = _Utils("torch._dynamo.utils")
        file = Path(torch.__file__).with_name("_dynamo") / "config.py"
        spec = importlib.util.spec_from_file_location("torch._dynamo.config", file)
        assert spec
        assert spec.loader
        sys.modules[spec.name] = _Dynamo.config = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_Dynamo.config)


def _real_dynamo() -> Any:
    if isinstance(sys.modules.get("torch._dynamo"), _Dynamo):
        # The submodules of the real module look for it both in sys.modules and in torch
        del sys.modules["torch._dynamo.utils"], sys.modules["torch._dynamo"], torch._dynamo
    torch._dynamo = importlib.import_module("torch._dynamo")
    return torch._dynamo


class _Utils(ModuleType):
    @staticmethod
    def get_optimize_ddp_mode() -> str:
        return "ddp_optimizer"

    @staticmethod
    def is_compile_supported(device_type: str) -> Any:
        return _real_dynamo().utils.is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real_dynamo().utils, name)


class _Dynamo(ModuleType):
    utils: _Utils
    config: ModuleType
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
        return getattr(_real_dynamo(), name)


def uncompiled(module: Any) -> Any:
    """Return the network that torch.compile was given for this one; anything else as it is."""
    return getattr(module, "_orig_mod", module)


def records_graphs(module: nn.Module) -> bool:
    """Return whether torch.compile was told to record a layer into CUDA graphs, as by mode="reduce-overhead"."""
    compiled = module, module._compiled_call_impl, vars(module).get("forward")
    asked = [getattr(one, "__dict__", {}).get("get_compiler_config") for one in compiled]
    return any(ask is not None and (ask() or {}).get("triton.cudagraphs") for ask in asked)


def allow_compiling(times: int) -> None:
    """Let torch.compile compile the same code up to `times` times, and make it choose kernels deterministically.

    The settings hold for the whole process. torch.compile runs code uncompiled once its limit is reached.

    Args:
        times: the limit to set. If torch's limit is higher already, it stays.
    """
    config = torch._dynamo.config
    # A compiler that chose kernels by measuring them might round a step differently after a restart
    torch._inductor.config.deterministic = True
    config.recompile_limit = max(config.recompile_limit, times)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, times)
