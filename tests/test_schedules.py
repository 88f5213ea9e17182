"""Learning rates over a training."""

import numpy as np
import pytest

from flyte_ddp import schedules

STEPS = 37


@pytest.mark.parametrize("warmup", [0.25, 0.01, 0.9])
def test_one_cycle_is_two_straight_lines(warmup):
    found = [schedules.one_cycle(step, STEPS, warmup) for step in range(STEPS + 1)]
    assert found == pytest.approx(np.interp(range(STEPS + 1), (0, warmup * STEPS, STEPS), (0.1, 1, 0.001)))
    assert schedules.one_cycle(STEPS, STEPS, warmup_fraction=1.0) == 1


def test_cosine_rises_to_one_and_falls_to_its_end():
    found = [schedules.cosine(step, 40, 0.25, end=0.1) for step in range(41)]
    assert 0 < found[0] < 0.1
    assert found[10] == max(found) == 1
    assert found[25] == pytest.approx(0.55)
    assert found[40] == pytest.approx(0.1)
    assert np.all(np.diff(found[:11]) > 0)
    assert np.all(np.diff(found[10:]) < 0)
    assert schedules.cosine(0, 40, 0.0) == 1
