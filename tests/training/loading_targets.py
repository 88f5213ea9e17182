"""What test_loading.py has ranks do: each function is a worker's."""

import os
import resource
import threading
from multiprocessing import active_children
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import numpy as np
import torch

from flyte_ddp.training.batches import TrainBatches
from flyte_ddp.training.environment import Environment
from flyte_ddp.training.events import CheckpointFailed
from flyte_ddp.training.loading import open_source
from flyte_ddp.training.loop import Link


def read_an_epoch(environment: Environment, link: Link, data: str) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Images and labels of this rank's share of each batch."""
    split = open_source(Path(data), "train", torch.device("cpu"))
    batches = TrainBatches(split, 1, 50, 1, environment.rank, environment.world.size)
    return [(batch.images.numpy(), batch.labels.numpy()) for batch in batches.epoch(0)]


def read_with_little_memory(environment: Environment, link: Link, data: str) -> int:
    """Reads the split in batches of two with no more than 96 MiB beyond what the process has; images read."""
    split = open_source(Path(data), "train", torch.device("cpu"))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + 96 * 2**20,) * 2)
    parts = [slice(start, start + 2) for start in range(0, len(split), 2)]
    return sum(len(images) for images, _ in split.fetch(torch.arange(len(split)), parts))


def load_and_wait(environment: Environment, link: Link, argument: Tuple[str, str]) -> None:
    """Writes the ids of its own process and of its loader workers to a file, in the middle of an epoch, and waits."""
    data, file = argument
    batches = _single_images(data)
    next(batches)
    Path(file).write_text(" ".join(str(pid) for pid in [os.getpid(), *(child.pid for child in active_children())]))
    link.emit(CheckpointFailed("all are waiting"))
    threading.Event().wait()


def signal_a_worker(environment: Environment, link: Link, argument: Tuple[str, int]) -> int:
    """Images that come after one loader worker was sent this signal."""
    data, number = argument
    batches = _single_images(data)
    next(batches)
    os.kill(active_children()[0].pid or 0, number)
    return len(list(batches))


def _single_images(data: str) -> Iterator[Any]:
    split = open_source(Path(data), "train", torch.device("cpu"))
    return split.fetch(torch.arange(100), [slice(start, start + 1) for start in range(100)])
