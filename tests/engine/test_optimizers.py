"""What a checkpoint lacks of an optimizer is refused or warned of, what the optimizer is not given is named."""

import re

import pytest
from torch import distributed

from flyte_ddp.engine.checks import optimizer_probe
from flyte_ddp.errors import InputError
from flyte_ddp.events import Event, RunStarted, StepLogged
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings
from tests.small_training import Unplugged


def run(name, output, on_event=None, **more):
    options = RunOptions(nproc=0, loader_workers=0, tracking="off", **more)
    recipe = f"tests.engine.optimizer_recipes:{name}"
    return train(recipe, Settings(epochs=2, log_interval=1), options, output=output, on_event=on_event)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Forgetful", r"_recipes.py, line \d+\): Slow keeps before, steps outside of its state_dict.*in its state or"),
        ("KeepsAGradient", r"Secant keeps a gradient itself in its state, .*: keep a copy, such as weight.grad.clone"),
        ("Recording", r"a checkpoint cannot hold state\['optimizer'\]\['state'\]\[0\]\['norms'\], of type deque"),
        ("Holding", r"Outer keeps something, such as the optimizer that it holds, outside of its state_dict"),
        ("Unloadable", r"Unloaded cannot go on from its own state_dict \(KeyError: 'fast'\)"),
    ],
)
def test_an_optimizer_that_would_go_on_otherwise_after_a_resume_is_refused(alone, tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        run(name, tmp_path)


def test_what_a_checkpoint_lacks_of_an_optimizer_without_effect_is_warned_of(alone, tmp_path):
    lost, kept = (run(name, tmp_path / name).warnings for name in ("Counting", "Remembering"))
    (warning,) = (warning for warning in lost if "state_dict" in warning)
    assert re.search(r"_recipes.py, line \d+\): Counted keeps steps outside of its state_dict", warning)
    assert not any("state_dict" in warning for warning in kept)


def test_of_a_large_network_a_few_weights_are_enough(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer_probe, "MOST_NUMBERS", 10)  # a bias
    with pytest.raises(InputError, match="Outer keeps something"):
        run("Holding", tmp_path)


def test_weights_that_the_optimizer_is_not_given_are_named(alone, tmp_path):
    events: list[Event] = []
    assert len(run("HalfGiven", tmp_path, events.append).epochs) == 2
    (started,) = (event for event in events if isinstance(event, RunStarted))
    assert any("optimizer() is not given 0.weight, 0.bias: they stay as" in remark for remark in started.remarks)


def test_a_scheduler_that_nothing_would_step_is_refused(alone, tmp_path):
    with pytest.raises(InputError, match=r"Scheduled\.optimizer .*without a scheduler.*lr_lambda\(step, steps\)"):
        run("Scheduled", tmp_path)


@pytest.mark.parametrize("name", ["FusedWhereItMay", "SharingABuffer"])
def test_a_resume_goes_on_from_an_unfused_optimizer_and_from_state_of_no_weight(alone, tmp_path, monkeypatch, name):
    def interrupt(event):
        if isinstance(event, StepLogged) and event.step == 2:
            raise Unplugged

    with pytest.raises(Unplugged):
        run(name, tmp_path, interrupt, checkpoint_seconds=0)
    distributed.destroy_process_group()
    monkeypatch.setenv("FUSED", "1")
    events: list[Event] = []
    assert len(run(name, tmp_path, events.append).epochs) == 2
    assert [event.first_step for event in events if isinstance(event, RunStarted)] == [1]
