"""What test_loading.py has ranks do: each function is a worker's."""

import os
import resource
import threading
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.events import CheckpointFailed
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.recipes.images import ImageClassifier


def read_an_epoch(
    environment: Environment, link: Link, argument: tuple[str, int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and labels of this rank's share of each batch."""
    batches = TrainBatches(streamed(*argument), 50, 1, environment.rank, environment.world.size)
    return [tuple(leaf.numpy() for leaf in batch.tree) for batch in batches.epoch(0)]


def read_with_little_memory(environment: Environment, link: Link, argument: tuple[str, int]) -> int:
    """Reads the split in batches of two with no more than 96 MiB beyond what the process has; images read."""
    split = streamed(*argument)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + 96 * 2**20,) * 2)
    return sum(len(images) for images, _ in split.fetch(torch.arange(len(split)).split(2)))


def load_and_wait(environment: Environment, link: Link, argument: tuple[str, int, str]) -> None:
    """Writes the ids of its own process and of its loader workers to a file, in the middle of an epoch, and waits."""
    data, workers, file = argument
    batches = _single_images(data, workers)
    next(batches)
    Path(file).write_text(" ".join(str(pid) for pid in [os.getpid(), *(child.pid for child in active_children())]))
    link.emit(CheckpointFailed("all are waiting"))
    threading.Event().wait()


def signal_a_worker(environment: Environment, link: Link, argument: tuple[str, int, int]) -> int:
    """Images that come after one loader worker was sent this signal."""
    data, workers, number = argument
    batches = _single_images(data, workers)
    next(batches)
    os.kill(active_children()[0].pid or 0, number)
    return len(list(batches))


def _single_images(data: str, workers: int) -> Iterator[Any]:
    return streamed(data, workers).fetch(torch.arange(100).split(1))


def streamed(data: str, workers: int) -> Streamed:
    return Streamed(ImageClassifier(Hyperparameters(), Path(data)).data("train"), torch.device("cpu"), workers)
