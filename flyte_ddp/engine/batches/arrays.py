"""Arrays of NumPy, whatever their layout, as tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.torch_compat import pytree

KINDS = "biufc"  # of numpy.dtype.kind: what can be numbers for torch
# 80-bit floats, for which torch has nothing
NARROWER = {np.dtype(np.longdouble): np.dtype(np.float64), np.dtype(np.clongdouble): np.dtype(np.complex128)}


def tensor_of(array: np.ndarray) -> Tensor:
    """The array, copied only where torch cannot hold it as it lies: with bytes swapped, negative strides, or floats of
    80 bits, which become float64.
    """
    native = array.dtype.newbyteorder("=")
    kind = NARROWER.get(native, native)
    if kind != array.dtype or any(stride < 0 or stride % kind.itemsize for stride in array.strides):
        array = array.astype(kind, order="C")
    return torch.as_tensor(array)


def with_dicts(tree: Any) -> Any:
    """With a dict for what is like one, such as the BatchEncoding that a tokenizer returns, into which no tree goes."""

    def with_dict(leaf: Any) -> Any:
        return with_dicts({key: leaf[key] for key in leaf}) if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(with_dict, tree)
