"""How soon all ranks hear of a request."""

import pytest

from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from tests.commands import ROOT


@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(5.0, [*range(1, 41)]), (0.03, [*range(3, 41, 3)]), (0.001, [16, 32])]
)
def test_ranks_hear_of_a_request_at_the_same_step_within_a_tenth_of_a_second(step_seconds, steps):
    target = "tests.lightning.targets:exchange_requests"
    heard = launcher.launch(target, choose_world("gloo", 2, 100), step_seconds, 60, print, root=str(ROOT))
    assert heard == [steps, steps]
