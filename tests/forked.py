"""Imported by the process that a session's ranks are forked from: what many of their recipes need."""

from flyte_ddp.engine.compiler_compat import defer_dynamo_import

defer_dynamo_import()  # as a rank does, before torchvision imports the compiler

import sklearn.datasets  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401
import torchvision.models  # noqa: E402, F401
