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

TRIED = 64  # from how many samples it shows whether a tensor comes padded


class Lengths:
    """The lengths of a split's samples, which all ranks know, so that they pad a global batch alike.

    If a rank padded to its own longest sample, shapes would depend on the number of ranks, and with them the random
    numbers.

    Attributes:
        each: (n,) int64, the length of each sample.
        is_padded: whether each of the sample's tensors is padded, in the order of pytree's leaves.
        come_padded: whether the split returns all samples padded to the longest one of the split.
    """

    def __init__(self, each: Any, count: int, fetch: Callable[[Tensor], Any]):
        """Check the lengths, and find out which tensors to pad.

        If even the shortest sample has a tensor of the longest one's length, samples come padded. Then each tensor of
        this length is cut. In up to TRIED + 1 samples it is checked for one value in all places after a sample's
        length: an embedding that happens to be as long must not be cut.

        Args:
            each: (count,) whole numbers, the length of each sample.
            count: the number of samples.
            fetch: fetch(indices (n,)) returns the samples' tensors, padded or not.

        Raises:
            InputError: No tensor's first dimension has these lengths in the shortest and the longest sample, or a
                tensor that has the longest one's length in both goes on after a sample's length.
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
            some = torch.cat([torch.arange(TRIED) * (count - 1) // (TRIED - 1), torch.tensor(ends[:1])]).unique()
            leaves = pytree.tree_leaves(fetch(some)) if any(self.is_padded) else []
            for number, (leaf, is_padded) in enumerate(zip(leaves, self.is_padded, strict=False)):
                if is_padded and not _is_padding(leaf, self.each[some]):
                    raise InputError(
                        "samples that come padded must have one value in all places after a sample's length, where "
                        f"they are cut, but tensor {number} of length {longest[0]} goes on there: pad it with 0, "
                        "return a Dataset of unpadded samples or, if it must not be cut, give it another first "
                        "dimension by unsqueeze(1)"
                    )
        if not any(self.is_padded):
            raise InputError(
                f"lengths must be those of the first dimension of a tensor's samples, but for samples {ends[0]} and "
                f"{ends[1]} they are {shortest[0]} and {longest[0]}, and the shapes {shapes[0]} and {shapes[1]}"
            )

    def of(self, indices: Tensor) -> "Lengths":
        """Return the lengths of the samples with these indices, (n,) int64."""
        part = copy.copy(self)
        part.each = self.each[indices]
        return part

    def padded(self, tree: Any, own: Tensor, global_indices: Tensor) -> Any:
        """Return a rank's samples with the length of the global batch's longest sample, so that all ranks pad alike.

        Shorter tensors are padded with zeros. Longer ones are cut, if samples come padded to the split's longest one.

        Args:
            tree: the tensors (n, length, ...) of the rank's samples. A tensor without lengths stays as it is.
            own: (n,) the indices of these samples; n is at least 1.
            global_indices: (N,) the indices of all samples of the global batch.

        Returns:
            The tree with tensors (n, longest, ...).

        Raises:
            DataError: A tensor is shorter than the longest of its n samples according to lengths(). Or it is longer
                than that, and samples do not come padded.
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


def _is_padding(leaf: Tensor, lengths: Tensor) -> bool:
    """Return whether each sample of a tensor (n, longest, ...) has one value after its length, which is in (n,)."""
    return all(bool((row[length:] == row[-1]).all()) for row, length in zip(leaf, lengths.tolist(), strict=True))


def get_lengths(split: Any) -> Lengths | None:
    """Return the lengths of a split's samples; None if the recipe has not said that they have lengths."""
    return getattr(split, "lengths", None)


class SimilarLengths:
    """An order of samples in which those of a batch have similar lengths.

    The samples of each `window` batches are sorted by length, stably, and cut into batches again, which are shuffled.
    No more than a window is in memory. It implements batches.Order.
    """

    def __init__(self, order: Any, each: Tensor, samples: int, batch_size: int, window: int, key: int):
        """Sort within windows of another order.

        `each` has the length of each sample of the split, (n,) int64. The epoch has `samples` samples, a window
        `window` batches.
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

    def _sort(self, window: int) -> Tensor:
        """Return the indices (n,) int64 of the samples of a window, in the order of the epoch.

        The samples are sorted by length and cut into batches, and the batches are shuffled, except that a short batch
        stays at the end. Within a batch, samples stay sorted. The last window may have fewer samples.

        Args:
            window: the number of the window, from 0.
        """
        first = window * self._width
        some = self._order.at(torch.arange(first, min(self._samples, first + self._width)))
        *batches, last = some[self._each[some].argsort(stable=True)].split(self._batch_size)
        if len(last) == self._batch_size:  # a short batch has to be the epoch's last
            batches = [*batches, last]
            last = last[:0]
        key = derive_key(Use.LENGTH_WINDOW, self._key, window)
        order = shuffled(torch.arange(len(batches)), len(batches), key) if batches else ()
        return torch.cat([*(batches[index] for index in order), last])
