"""What ranks run to inspect the steps of their training one by one: waits, memory, arithmetic."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from flyte_ddp.engine import worker
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link

FIRST = 4  # steps that are not inspected: algorithms are chosen in them, and memory is allocated


@contextmanager
def inspected(look: AbstractContextManager[Any], steps: list[int]) -> Iterator[None]:
    """While the block runs, all but the first steps of a training, each with fetching its batch, run within `look`."""
    train_step, in_turn = TrainingState.train_step, TrainBatches.steps

    def stepped(state: TrainingState, shares: list[Batch], *requests: bool) -> None:
        if state.progress.step < FIRST:
            return train_step(state, shares, *requests)
        with look:
            train_step(state, shares, *requests)
        steps.append(state.progress.step)

    def fetched(
        batches: TrainBatches, number: int, first_step: int = 0, end: int | None = None
    ) -> Iterator[list[Batch]]:
        each = in_turn(batches, number, first_step, end)
        yield from [next(each) for _ in range(FIRST)]
        while True:
            with look:
                following = next(each, None)
            if following is None:
                return
            yield following

    with patch.object(TrainingState, "train_step", stepped), patch.object(TrainBatches, "steps", fetched):
        yield


class Unwaiting:
    """While the block runs, whatever makes the host wait for the GPU raises an error."""

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def find_waits(environment: Environment, link: Link, job: Job) -> int:
    """How many steps ran in which anything that makes the host wait for the GPU would have raised an error."""
    steps: list[int] = []
    with inspected(Unwaiting(), steps):
        worker.run(environment, link, job)
    return len(steps)


def measure_peaks(environment: Environment, link: Link, job: Job) -> tuple[int, int, int]:
    """Bytes on the GPU: the most during the trials, the most afterwards as reported, and of the weights."""
    seen: list[int] = []
    reset = torch.cuda.reset_peak_memory_stats

    def note(*device: Any) -> None:
        seen.append(torch.cuda.max_memory_allocated())
        reset(*device)

    with patch.object(torch.cuda, "reset_peak_memory_stats", note):
        result = worker.run(environment, link, job)
    return max(seen), result.peak_gpu_bytes, 4 * result.parameters


def train_in_any_order(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """A training with torch's own settings of arithmetic."""
    with patch.object(worker, "settle_arithmetic", lambda: None):
        return worker.run(environment, link, job)


def count_devices(environment: Environment, link: Link, argument: Any) -> int:
    return torch.cuda.device_count()


def describe(environment: Environment, link: Link, argument: Any) -> str:
    """The GPU and the versions; raises RuntimeError if torch does not support it."""
    major, minor = torch.cuda.get_device_capability()
    codes = [int(name.removeprefix("sm_")) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    if not any(code // 10 == major and code % 10 <= minor for code in codes):
        raise RuntimeError(f"torch supports compute capabilities {codes}, the GPU has {major}{minor}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}"
