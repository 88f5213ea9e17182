"""What ranks run to have the steps of their training looked at, one by one: operations, launches, waits, seconds."""

import time
from collections import Counter
from contextlib import contextmanager
from typing import Any, ContextManager, Iterator, List, NamedTuple, Tuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flyte_ddp.engine import worker
from flyte_ddp.engine.batches import Batch, TrainBatches
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link

FIRST = 4  # steps that are not looked at: algorithms are chosen in them, and memory is taken


class Operations(TorchDispatchMode):
    """Counts the operations that compute something, and the others: views, and what torch writes down of itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computing: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition(".")[0]  # without its overload
        is_computing = not function.is_view and not name.startswith(("profiler::", "aten::empty"))
        (self.computing if is_computing else self.others)[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def looked_at(look: ContextManager[Any], steps: List[int]) -> Iterator[None]:
    """Meanwhile all but the first steps of a training are made within look, and with each the fetching of its batch."""
    train_step, epoch = TrainingState.train_step, TrainBatches.epoch

    def stepped(state: TrainingState, batch: Batch, stop: bool) -> None:
        if state.step < FIRST:
            return train_step(state, batch, stop)
        with look:
            train_step(state, batch, stop)
        steps.append(state.step)

    def fetched(batches: TrainBatches, number: int, first_step: int = 0) -> Iterator[Batch]:
        each = epoch(batches, number, first_step)
        for batch in [next(each) for _ in range(FIRST)]:
            yield batch
        while True:
            with look:
                following = next(each, None)
            if following is None:
                return
            yield following

    with patch.object(TrainingState, "train_step", stepped), patch.object(TrainBatches, "epoch", fetched):
        yield


def count_operations(environment: Environment, link: Link, job: Job) -> Tuple[float, List[str]]:
    """The operations of a step on average, and the names of all."""
    operations = Operations()
    steps: List[int] = []
    with looked_at(operations, steps):
        worker.run(environment, link, job)
    return operations.computing.total() / len(steps), sorted(operations.computing | operations.others)
