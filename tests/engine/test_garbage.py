"""Garbage is collected between two steps of a training, on all ranks at the same ones, and never within one."""

import gc
import weakref
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Dataset

from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.garbage import collect_garbage_between


class Cycle:
    def __init__(self):
        self.own = self


def test_what_a_step_leaves_behind_is_collected_before_the_next_one_and_not_earlier():
    left: list[weakref.ref[Cycle]] = []
    for number in collect_garbage_between(iter(range(3))):
        assert not gc.isenabled()
        assert [one() for one in left] == [None] * number
        left.append(weakref.ref(Cycle()))
        assert left[-1]() is not None
    assert gc.isenabled()


def test_it_goes_on_by_itself_when_a_step_fails():
    steps = collect_garbage_between(iter(range(3)))
    next(steps)
    steps.close()
    assert gc.isenabled()


class Collecting(Dataset[Any]):
    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(index)

    def __len__(self):
        return 4


def test_loader_workers_do_not_end_a_store_that_failed_before_they_were_forked():
    """And the process that forks them goes on leaving alone what it did, or each rank would copy what all share."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    for _ in collect_garbage_between(iter(range(1))):  # until here it is garbage
        garbage: Any = Cycle()
        garbage.store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        del garbage
        (samples,) = Streamed(Collecting(), torch.device("cpu"), workers=1).fetch([torch.arange(4)])
    assert samples.tolist() == [0, 1, 2, 3]
    assert gc.get_freeze_count() > frozen * 0.9 > 0, "some have ended since"
