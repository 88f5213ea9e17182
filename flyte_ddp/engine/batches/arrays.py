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
    """Return the array as a tensor, which shares the array's memory unless torch cannot hold the array as it is.

    An array is copied if its bytes are swapped, if it has strides that torch lacks, such as negative ones, or if it has
    floats of 80 bits, which become float64.
    """
    native = array.dtype.newbyteorder("=")
    kind = NARROWER.get(native, native)
    if kind != array.dtype or any(stride < 0 or stride % kind.itemsize for stride in array.strides):
        array = array.astype(kind, order="C")
    return torch.as_tensor(array)


def replace_mappings(tree: Any) -> Any:
    """Return a copy of a tree with a dict in place of each mapping that torch's pytree would take for a leaf.

    An example is a tokenizer's BatchEncoding. dict, OrderedDict and defaultdict keep their types. Tensors are not
    copied.
    """

    def with_dict(leaf: Any) -> Any:
        return replace_mappings({key: leaf[key] for key in leaf}) if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(with_dict, tree)
