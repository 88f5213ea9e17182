"""Garbage is collected between two steps of a training, on all ranks at the same ones, and never within one."""

import gc
import weakref

from flyte_ddp.engine.garbage import collected_between


class Cycle:
    def __init__(self):
        self.own = self


def test_what_a_step_leaves_behind_is_collected_before_the_next_one_and_not_earlier():
    left: list[weakref.ref[Cycle]] = []
    for number in collected_between(iter(range(3))):
        assert not gc.isenabled()
        assert [one() for one in left] == [None] * number
        left.append(weakref.ref(Cycle()))
        assert left[-1]() is not None
    assert gc.isenabled()


def test_it_goes_on_by_itself_when_a_step_fails():
    steps = collected_between(iter(range(3)))
    next(steps)
    steps.close()
    assert gc.isenabled()
