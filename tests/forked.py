"""Imported by the process that a session's ranks are forked from: what many of their recipes need."""

import functools
import importlib.metadata

from flyte_ddp.engine.compiler_compat import defer_dynamo_import

defer_dynamo_import()  # as a rank does, before torchvision imports the compiler

import sklearn.datasets  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401
import torchvision.models  # noqa: E402, F401

import flyte_ddp.recipes.images  # noqa: E402, F401

# A process group asks all installed packages for back ends: once for all ranks, or each would read hundreds of files
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[assignment]
importlib.metadata.entry_points(group="torch.distributed.backends")
