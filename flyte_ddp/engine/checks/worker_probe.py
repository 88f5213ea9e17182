"""Checks that loader workers read the same samples: two at once, in other orders, and each from the start."""

import hashlib
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from flyte_ddp.engine.batches.loading import Streamed, read_samples
from flyte_ddp.engine.torch_compat import pytree

CPU = torch.device("cpu")
MOST_TURNS = 4096  # about 0.1 s
TURN_SECONDS = 5.0  # a worker may wait for a lock that the other one holds
GO, END = b"g", b"e"


class Fault(Enum):
    """Why loader workers read other samples, with the remedy."""

    KEPT = (
        "gives other samples after others were read: keep nothing that was drawn from one sample to the next; draw it "
        "in each __getitem__, or in __init__ from a generator with a seed, such as numpy.random.default_rng(0)"
    )
    SHARED = (
        "gives other samples where two loader workers read at once, as they share what it has opened: open it at first "
        "use in __getitem__, or set loader_workers to 0"
    )


def fault_of_workers(split: Streamed, chosen: Tensor, expected: np.ndarray) -> Fault | None:
    """Return why the workers of this rank read other samples than `expected`, or None.

    Args:
        split: the samples, whose workers are forked anew for this.
        chosen: (n,) int64, the samples that are read, in increasing order.
        expected: (n,) int64, what `sample_digests` has returned for them.
    """
    ends = socket.socketpair()
    try:
        at_once = Streamed(_Digests(split.dataset, ends), CPU, workers=2)
        read = [digests.numpy() for digests in at_once.fetch([chosen.roll(1), chosen.roll(2)])]
    finally:
        for end in ends:
            end.close()
    if all((digests == expected).all() for digests in read):
        return None
    alone = Streamed(_Digests(split.dataset), CPU, workers=1)
    (digests,) = (digests.numpy() for digests in alone.fetch([chosen.roll(1)]))
    return Fault.SHARED if (digests == expected).all() else Fault.KEPT


def sample_digests(dataset: Any, indices: np.ndarray) -> np.ndarray:
    """Read samples in the order of `indices`, as in a training; return their digests (n,) int64 by increasing index."""
    digests = np.zeros(len(indices), np.int64)
    for row, place in enumerate(indices.argsort().argsort()):
        leaves = pytree.tree_leaves(read_samples(dataset, indices[row : row + 1], origin=(0, int(place))))
        content = [(array.dtype.str, array.shape, array.tobytes()) for array in map(np.asarray, leaves)]
        digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
        digests[place] = int.from_bytes(digest, "little", signed=True)
    return digests


class _Digests:
    """A Dataset whose batches are the digests of another one's samples.

    ends: with them, two workers read in turns.
    """

    def __init__(self, dataset: Any, ends: tuple[socket.socket, ...] = ()):
        self.dataset, self.ends = dataset, ends

    def __len__(self) -> int:
        return len(self.dataset)

    def read_batch(self, indices: np.ndarray) -> np.ndarray:
        if not self.ends:
            return sample_digests(self.dataset, indices)
        worker = get_worker_info()
        assert worker
        with _in_turns(self.ends[worker.id]):
            try:
                return sample_digests(self.dataset, indices)
            except Exception:  # of a file read in the wrong place; a worker by itself has read these samples
                return np.zeros(len(indices), np.int64)


@contextmanager
def _in_turns(end: socket.socket) -> Iterator[None]:
    """After each call of a function in C, such as seek or read, wait for the other worker to make one, too.

    So a shared offset shows each time, instead of once in a thousand samples.
    """
    turns = count(1)

    def called(_frame: object, event: str, _function: object) -> None:
        if event != "c_return":
            return
        end.send(GO)
        is_answered = bool(select.select([end], [], [], TURN_SECONDS)[0])
        if not is_answered or end.recv(1) == END or next(turns) == MOST_TURNS:
            sys.setprofile(None)
            end.send(END)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        end.send(END)
