"""Rows on failures: which rank is named, and whether it is retried."""

import random
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_rows.fault_settings import Settings
from benchmarks.gpu_rows.row import Machine, Row, expect
from benchmarks.gpu_rows.training import FAULTY, train
from benchmarks.hangs import hang_in_time, named
from benchmarks.slowed_settings import SLOWED
from benchmarks.slowed_settings import Settings as Slowed
from flyte_ddp.events import Event, SlowRank
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import Failure, RankError


def failure(machine: Machine, world: World, fault: str, ranks: str = "1", **settings: Any) -> Failure:
    try:
        train(FAULTY, Settings(fault=fault, ranks=ranks, **settings), world)
    except RankError as failed:
        return failed.failure
    raise AssertionError("it did not fail")


def fails(fault: str, cause: str, says: str, recoverable: bool) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        if fault == "out of memory":
            machine.need_gpus()
        found = failure(machine, machine.world(), fault)
        first = f"rank {found.rank}: {found.cause}: {found.message.splitlines()[0][:80]}"
        expect(found.rank == 1 or "rank 1" in found.message, first)
        expect(found.cause == cause and says in found.message and found.recoverable == recoverable, first)
        return f"rank 1, {cause}, {'retried' if recoverable else 'final'}"

    return check


def hangs(way: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        if way == "sleeping kernel":
            machine.need_gpus()
        for ranks in ((0,), (1,)):
            found = hang_in_time(way, ranks, random.Random(0), machine.world())
            expect(named(found) == ranks, f"rank {ranks[0]} hung, {named(found)} named")
            expect(found.recoverable and "rank 0:" in found.details and "rank 1:" in found.details, "no stacks")
        return "rank 0 and rank 1 named, with stacks"

    return check


def slow_rank(machine: Machine) -> str:
    for way, cause in (("data", "data"), ("forward pass", "compute")):
        events: list[Event] = []
        settings = Slowed(way=way, rank=1, milliseconds=60, epochs=6)
        train(SLOWED, settings, machine.world(), on_event=events.append)
        said = [(event.rank, event.cause) for event in events if isinstance(event, SlowRank)]
        expect(said == [(1, cause)], f"{way} of rank 1 is slow, {said} named")
    return "rank 1 named for its data, and for its step"


def duplicate_gpu(machine: Machine) -> str:
    machine.need_gpus()
    ranks = machine.gpus + 1
    found = failure(machine, World(ranks, ranks, "nccl", "cuda"), "none")
    expect("Duplicate GPU" in found.message and not found.recoverable, str(found)[:200])
    return "final, with a remedy"


ROWS = [
    Row("NaN", fails("nan", "NonFiniteError", "loss is not finite", False)),
    Row("SIGKILL", fails("kill", "SIGKILL", "", True)),
    Row("out of memory on the GPU", fails("out of memory", "OutOfMemoryError", "lower batch_size", False)),
    Row("two ranks on one GPU under nccl", duplicate_gpu),
    Row("SIGSTOP", hangs("stop"), is_quick=False),
    Row("SIGSTOP at any moment", hangs("stopped from outside"), is_quick=False),
    Row("a sleep in the data", hangs("sleep in the data"), is_quick=False),
    Row("a sleep in a step", hangs("sleep"), is_quick=False),
    Row("a slow rank", slow_rank, is_quick=False),
    Row("a sleeping kernel", hangs("sleeping kernel")),
]
