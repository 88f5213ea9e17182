"""Samples of different lengths: padding to the longest of the global batch, and batches of similar lengths."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flyte_ddp.engine.batches.order import shuffled
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.random_numbers import Use, derive_key


class Lengths:
    """The lengths of a split's samples, which all ranks know, so that they pad a global batch alike.

    A rank's own longest sample would not do: random numbers belong to positions, and so need the same shapes on all
    ranks.
    """

    def __init__(self, each: Any, count: int, fetch: Callable[[Tensor], Any]):
        """Check the lengths, and find out which tensors to pad.

        Args:
            each: (count,) whole numbers.
            count: the number of samples.
            fetch: fetch(indices (n,)) returns the samples' tensors, padded or not.

        Raises:
            InputError: the lengths are not those of the samples.
        """
        try:
            values = np.asarray(each)
        except ValueError:  # NumPy raises it for lists of different lengths
            values = np.asarray(None)
        if values.shape != (count,) or values.dtype.kind not in "iu" or values.min() < 1:
            raise InputError(
                f"lengths must be {count} whole numbers of at least 1, one for each sample, got shape {values.shape} "
                f"of {values.dtype.name}"
            )
        self.each = torch.from_numpy(values.astype(np.int64))
        ends = [int(self.each.argmin()), int(self.each.argmax())]
        shapes = [[leaf.shape[1:2] for leaf in pytree.tree_leaves(fetch(torch.tensor([index])))] for index in ends]
        shortest, longest = ((int(self.each[index]),) for index in ends)
        pairs = list(zip(*shapes, strict=True))
        self.is_padded = [pair == (shortest, longest) for pair in pairs]
        self.come_padded = not any(self.is_padded)  # even the shortest sample has the longest one's shape
        if self.come_padded:
            self.is_padded = [pair == (longest, longest) for pair in pairs]
        if not any(self.is_padded):
            raise InputError(
                f"lengths must be those of the first dimension of a tensor's samples, but for samples {ends[0]} and "
                f"{ends[1]} they are {shortest[0]} and {longest[0]}, and the shapes {shapes[0]} and {shapes[1]}"
            )

    def of(self, indices: Tensor) -> "Lengths":
        """Return the lengths of a part of the split."""
        part = copy.copy(self)
        part.each = self.each[indices]
        return part

    def padded(self, tree: Any, own: Tensor, global_indices: Tensor) -> Any:
        """Pad a rank's samples with zeros up to the longest sample of the global batch.

        Args:
            tree: the rank's samples.
            own: (n,) their indices.
            global_indices: (N,) the indices of the global batch.
        """
        longest, most = (int(self.each[indices].max()) for indices in (global_indices, own))
        leaves, structure = pytree.tree_flatten(tree)
        fitted = []
        for leaf, is_padded in zip(leaves, self.is_padded, strict=True):
            if is_padded:
                if leaf.shape[1] < most or (leaf.shape[1] > most and not self.come_padded):
                    raise DataError(f"samples have a length of at most {leaf.shape[1]}, but lengths says {most}")
                leaf = F.pad(leaf, [0, 0] * (leaf.ndim - 2) + [0, longest - leaf.shape[1]])  # a negative pad cuts off
            fitted.append(leaf)
        return pytree.tree_unflatten(fitted, structure)


def padded(split: Any, tree: Any, own: Tensor, global_indices: Tensor) -> Any:
    """Pad a rank's samples as Lengths.padded does. Returns the tree as it is if the split has no lengths."""
    lengths = get_lengths(split)
    return lengths.padded(tree, own, global_indices) if lengths else tree


def get_lengths(split: Any) -> Lengths | None:
    return getattr(split, "lengths", None)


class SimilarLengths:
    """An order of samples in which those of a batch have similar lengths.

    The samples of each `window` batches are sorted, stably, and cut into batches again, which are shuffled. It needs no
    more than the window's samples.
    """

    def __init__(self, order: Any, each: Tensor, samples: int, batch_size: int, window: int, key: int):
        """Sort within windows of another order.

        Args:
            order: a random order.
            each: the length of each sample.
            samples: the number of samples of the epoch.
            batch_size: samples of a batch.
            window: batches of a window.
            key: the key of this epoch.
        """
        self._order = order
        self._each = each
        self._samples = samples
        self._batch_size = batch_size
        self._key = key
        self._width = window * batch_size
        self._sorted = lru_cache(2)(self._sort)

    def fetch(self, parts: Iterable[Tensor], steps: range) -> Iterator[Any]:
        fetched: Iterator[Any] = self._order.fetch(parts, steps)
        return fetched

    def check_room(self) -> None:
        self._order.check_room()

    def at(self, positions: Tensor) -> Tensor:
        samples = torch.empty_like(positions)
        windows = positions // self._width
        for number in windows.unique().tolist():
            here = windows == number
            samples[here] = self._sorted(number)[positions[here] - number * self._width]
        return samples

    def _sort(self, number: int) -> Tensor:
        first = number * self._width
        some = self._order.at(torch.arange(first, min(self._samples, first + self._width)))
        *batches, last = some[self._each[some].argsort(stable=True)].split(self._batch_size)
        if len(last) == self._batch_size:  # a short batch has to be the epoch's last
            batches = [*batches, last]
            last = last[:0]
        key = derive_key(Use.LENGTH_WINDOW, self._key, number)
        order = shuffled(torch.arange(len(batches)), len(batches), key) if batches else ()
        return torch.cat([*(batches[index] for index in order), last])
