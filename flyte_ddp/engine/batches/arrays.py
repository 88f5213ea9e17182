"""The conversion of NumPy's arrays, whatever their layout, to tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.engine.torch_compat import pytree

KINDS = "biufc"  # the values of numpy.dtype.kind that torch can take as numbers
# Torch has no type for floats of 80 bits, so they become float64
NARROWER = {np.dtype(np.longdouble): np.dtype(np.float64), np.dtype(np.clongdouble): np.dtype(np.complex128)}


def to_tensor(array: np.ndarray) -> Tensor:
    """Return the array as a tensor that shares the array's memory, or has a copy if torch cannot hold the array.

    Copied are arrays with swapped bytes, with strides that torch lacks, such as negative ones, and of floats of 80
    bits, which become float64.
    """
    native = array.dtype.newbyteorder("=")
    kind = NARROWER.get(native, native)
    if kind != array.dtype or any(stride < 0 or stride % kind.itemsize for stride in array.strides):
        array = array.astype(kind, order="C")
    return torch.as_tensor(array)


def replace_mappings(tree: Any) -> Any:
    """Return a tree in which dicts replace the mappings that torch's pytree does not know, on all levels.

    pytree knows dict, OrderedDict and defaultdict, which keep their types. Other mappings, such as a tokenizer's
    BatchEncoding, would be leaves. The given tree is not changed. The tensors are not copied.
    """

    def with_dict(leaf: Any) -> Any:
        return replace_mappings({key: leaf[key] for key in leaf}) if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(with_dict, tree)
