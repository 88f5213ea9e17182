"""Stand-ins for torch's compiler, which parts of torch import though nothing is compiled; as of version 2.15.0."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@contextmanager
def inductor_left_out() -> Iterator[None]:
    """Put in a stand-in for the compiler, which the profiler imports only to ask whether it records CUDA graphs.

    That import takes longer than torch's own, and needs the torch._dynamo that leave_dynamo_out replaces.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    package, config = ModuleType("torch._inductor"), ModuleType("torch._inductor.config")
    config.triton = SimpleNamespace(cudagraphs=False)  # type: ignore[attr-defined]
    package.config = config  # type: ignore[attr-defined]
    torch._inductor = package
    sys.modules.update({module.__name__: module for module in (package, config)})
    try:
        yield
    finally:
        del torch._inductor, sys.modules[package.__name__], sys.modules[config.__name__]


def leave_dynamo_out() -> None:
    """Replace torch._dynamo by a stand-in, unless it is already imported.

    Importing the real module takes longer than importing torch (3.6 s after 2.7 s on two EPYC cores, torch 2.15), and
    every rank would wait for it. DistributedDataParallel and torch.optim only use it to exclude themselves from
    compiling. Torchvision's models hardly ever use it.

    The stand-in has what these need. It also has the real torch._dynamo.config, which torch.utils.checkpoint and FSDP
    read. Any other attribute loads the real module.
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
        # its submodules look for it in both places
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
