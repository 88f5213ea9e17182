"""Splits as the ranks read them: resident on the device, or decoded from files by processes of the rank's own."""

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flyte_ddp.training import prepared
from flyte_ddp.training.batches import Split
from flyte_ddp.training.errors import DataError
from flyte_ddp.training.image_files import ImageFiles

# Forked, a worker has its first batch after 0.04 s; it must not touch CUDA, and does not. A forkserver would be one of
# the rank's own and import torch once more (6 s on two busy cores). macOS's libraries don't survive a fork.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


def open_source(data: Path, split: str, device: torch.device) -> Split:
    """The named split of the prepared dataset in the folder data, whichever its form."""
    description = prepared.read_description(data)
    images, labels = prepared.open_images(data, split)
    form: Any = StreamedSplit if isinstance(images, ImageFiles) else Split
    return form(images, labels, description.mean, description.std, device)


class StreamedSplit(Split):
    """A split whose images come from files, some batches ahead of their use; it never holds more of them than that."""

    def __init__(
        self,
        files: ImageFiles,
        labels: np.ndarray,
        mean: Tuple[float, ...],
        std: Tuple[float, ...],
        device: torch.device,
    ):
        super().__init__(np.empty((0, *files.shape), np.uint8), labels, mean, std, device)
        self.files = files

    def fetch(self, order: Tensor, parts: Sequence[slice]) -> Iterator[Tuple[Tensor, Tensor]]:
        """As Split has it. The workers start with the first part and end with the last, or with this generator."""
        access, workers = self.files.access, min(self.files.access.workers, len(parts))
        # A rank's process is daemonic, and those may have no children; these end with it all the same: see _begin
        multiprocessing.current_process().daemon = False
        indices: Any = [order[part].numpy() for part in parts]
        loader = DataLoader(
            _Decoder(self.files),
            batch_sampler=indices,
            num_workers=workers,
            multiprocessing_context=START_METHOD if workers else None,
            worker_init_fn=_begin if workers else None,
            collate_fn=_as_it_is,
            pin_memory=access.pin_memory and self.device.type == "cuda",
            generator=torch.Generator(),  # it draws a seed for the workers: not from the ranks' numbers
        )
        # Sent to the whole group, SIGTERM asks the rank for one more step: the workers, too, have to live on for that
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for part, decoded in zip(parts, batches, strict=True):
            if decoded.problem:
                raise DataError(decoded.problem)
            yield decoded.tensor.to(self.device, non_blocking=True), self.labels[order[part]]


class _Decoded:
    """The images (n, C, H, W) uint8 of a batch on their way to the rank, or what is wrong with one of them.

    As an array they come through a pipe. A tensor would come in shared memory, of which containers have little, and
    torch's book-keeping of that scatters the heap: 0.5 GB more for batches of 128 x 3 x 64 x 64 after 200 batches.
    """

    def __init__(self, images: np.ndarray, problem: str = ""):
        self.images, self.problem = images, problem

    def pin_memory(self) -> "_Pinned":
        """DataLoader calls this, in a thread of the rank, where page-locked memory is asked for."""
        return _Pinned(self.tensor.pin_memory(), self.problem)

    @property
    def tensor(self) -> Tensor:
        return torch.from_numpy(self.images)


class _Pinned(NamedTuple):
    tensor: Tensor
    problem: str


class _Decoder(Dataset[Any]):
    """What DataLoader takes for a dataset: it gives the images of a whole batch at once."""

    def __init__(self, files: ImageFiles):
        self.files = files

    def __getitems__(self, indices: np.ndarray) -> _Decoded:
        images = np.empty((len(indices), *self.files.shape), np.uint8)
        try:
            for image, index in zip(images, indices, strict=True):
                image[:] = self.files[index]
        except DataError as error:  # raised here, it would come out wrapped in two tracebacks
            return _Decoded(images[:0], str(error))
        return _Decoded(images)


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin(_: int) -> None:
    """Undoes what a loader worker has from its rank, and makes it end when the rank ends, however that happens."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the rank's lead to its parent, by a line it has to itself
    sys.excepthook = lambda *_: None  # multiprocessing's own thread would print what it loses with a killed rank
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
