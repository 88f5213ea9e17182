"""What ranks run to inspect the steps of their training one by one: operations, launches, waits, seconds."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from flyte_ddp.engine import worker
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import TorchDispatchMode
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link

FIRST = 4  # steps that are not inspected: algorithms are chosen in them, and memory is allocated


class Operations(TorchDispatchMode):
    """Counts the operations that compute something, and the others: views and torch's own bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.computing: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition(".")[0]  # without its overload
        is_computing = not function.is_view and not name.startswith(("profiler::", "aten::empty"))
        (self.computing if is_computing else self.others)[name] += 1
        return function(*args, **(kwargs or {}))


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


def count_operations(environment: Environment, link: Link, job: Job) -> tuple[float, dict[str, float]]:
    """The average number of operations per step, and that of each, with views and bookkeeping, by name."""
    operations = Operations()
    steps: list[int] = []
    with inspected(operations, steps):
        worker.run(environment, link, job)
    each = operations.computing + operations.others
    return operations.computing.total() / len(steps), {name: count / len(steps) for name, count in each.items()}


def count_launches(environment: Environment, link: Link, job: Job) -> float:
    """The average number of kernel launches per step on a GPU."""
    kinds = torch.profiler.ProfilerActivity
    steps: list[int] = []
    with (
        torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler,
        inspected(torch.profiler.record_function("a step"), steps),
    ):
        worker.run(environment, link, job)
    events = profiler.events()
    spans = [event.time_range for event in events if event.name == "a step"]
    launches = [event for event in events if event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))]
    within = sum(any(span.start <= one.time_range.start <= span.end for span in spans) for one in launches)
    return within / len(steps)


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


def compare_tf32(environment: Environment, link: Link, argument: Any) -> tuple[float, float, float, float]:
    """For a convolution with TF32 and with IEEE float32: both relative errors, then both times in milliseconds."""
    features, weights = torch.randn(256, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    exact = torch.nn.functional.conv2d(features.double(), weights.double(), padding=1)
    errors, milliseconds = [], []
    for torch.backends.cudnn.allow_tf32 in (True, False):
        for count in (10, 100):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                found = torch.nn.functional.conv2d(features, weights, padding=1)
            torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - started) / count * 1e3)
        errors.append(float((found - exact).norm() / exact.norm()))
    return (*errors, *milliseconds)  # type: ignore[return-value]
