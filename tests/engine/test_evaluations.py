"""Several evaluations per epoch: they change nothing of the training, resume anywhere, and patience counts them."""

import pytest
import torch
from torch import distributed

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.engine.worker import run
from flyte_ddp.errors import InputError, StopRequested
from flyte_ddp.events import EpochChosen, EpochFinished, RunStarted, StepLogged
from flyte_ddp.launch.environment import Environment, choose_world
from flyte_ddp.launch.link import Link
from flyte_ddp.settings import RunOptions
from tests.commands import same
from tests.engine.buffer_recipes import CountsEvaluations
from tests.engine.probe_recipes import Settings
from tests.small_training import Unplugged, identical, relative_difference

# 254 samples to train on: 16 steps, the last one short, so evaluations are after 5, 10 and 16 of them
THRICE = {"evaluations_per_epoch": 3, "validation_fraction": 0.2, "epochs": 2, "log_interval": 1}
STOPPING = "tests.launch.targets:stop_after_the_fifth_step"


def of(trained, kind):
    return [event for event in trained.events if isinstance(event, kind)]


def positions(trained):
    return [epoch.position for epoch in trained.result.epochs]


def last_weights(trained):
    return torch.load(trained.folder / "last.pt", weights_only=True)


def test_an_evaluation_within_an_epoch_changes_nothing_of_the_training(whole):
    """And its measures are of the samples since the last one."""
    once, thrice = whole(1, **{**THRICE, "evaluations_per_epoch": 1}), whole(1, **THRICE)
    assert same(last_weights(once), last_weights(thrice))
    assert positions(thrice) == [5 / 16, 10 / 16, 1, 1 + 5 / 16, 1 + 10 / 16, 2]
    assert positions(once) == [1, 2]
    epochs = thrice.result.epochs
    assert [epoch.samples for epoch in epochs] == [80, 80, 94] * 2
    assert [epoch.validation for epoch in epochs[2::3]] == [epoch.validation for epoch in once.result.epochs]
    for number, epoch in enumerate(once.result.epochs):
        parts = epochs[3 * number : 3 * number + 3]
        mean = sum(part.train["loss"] * part.samples for part in parts) / 254
        assert mean == pytest.approx(epoch.train["loss"])
    steps = [(event.epoch, event.step) for event in of(thrice, StepLogged)]
    assert steps == [(epoch, step) for epoch in (0, 1) for step in range(1, 17)]


def test_the_best_evaluation_does_not_depend_on_the_ranks(train, whole):
    one, three = whole(1, **THRICE), train(3, **THRICE)
    accuracies = [epoch.validation["accuracy"] for epoch in one.result.epochs]
    assert one.result.chosen_epoch == accuracies.index(max(accuracies))
    (chosen,) = of(one, EpochChosen)
    assert chosen.position == positions(one)[one.result.chosen_epoch]
    assert not chosen.stopped_early
    assert relative_difference(one, three) < 1e-5
    assert (three.result.chosen_epoch, positions(three)) == (one.result.chosen_epoch, positions(one))


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "step"), [(0, 7), (1, 16)])
def test_a_run_that_is_killed_between_evaluations_goes_on_with_the_same_bits(train, whole, epoch, step):
    def unplug(event):
        if isinstance(event, StepLogged) and (event.epoch, event.step) == (epoch, step):
            raise Unplugged

    with pytest.raises(Unplugged):
        train(1, name="cut", checkpoint_seconds=0, on_event=unplug, **THRICE)
    resumed = train(1, name="cut", **THRICE)
    expected, started = whole(1, **THRICE), of(resumed, RunStarted)[0]
    assert started.first_epoch or started.first_step
    assert identical(expected, resumed)
    assert positions(resumed) == positions(expected)
    assert resumed.result.chosen_epoch == expected.result.chosen_epoch


def test_a_run_that_is_asked_to_stop_just_before_an_evaluation_begins_with_it(train, whole):
    assert train(1, name="stopped", target=STOPPING, **THRICE) == [(0, 5)]
    resumed = train(1, name="stopped", **THRICE)
    started = of(resumed, RunStarted)[0]
    assert (started.first_epoch, started.first_step) == (0, 5)
    assert isinstance(resumed.events[1], EpochFinished)
    assert identical(whole(1, **THRICE), resumed)


@pytest.mark.slow
def test_patience_counts_evaluations_and_ends_within_an_epoch(train, tmp_path):
    impatient = {**THRICE, "epochs": 5, "patience": 1, "minimum_delta": 0.99, "learning_rate": 0.001}
    stopped = train(name="stopped", **impatient)
    (chosen,) = of(stopped, EpochChosen)
    assert (chosen.stopped_early, chosen.epochs, len(stopped.result.epochs)) == (True, 10 / 16, 2)
    again = train(name="stopped", **impatient)
    assert not of(again, StepLogged), "a finished training has nothing left to do"
    assert identical(stopped, again)
    on = train(name="on", init=tmp_path / "stopped" / "final-checkpoint", **{**impatient, "patience": 4})
    expected = train(name="whole", **{**impatient, "patience": 4})
    assert positions(on) == positions(expected) == [5 / 16, 10 / 16, 1, 1 + 5 / 16, 1 + 10 / 16]
    assert identical(on, expected)


def test_each_step_may_be_evaluated_but_no_more(train):
    thirds = {"batch_size": 127, "evaluations_per_epoch": 3}
    assert positions(train(1, **thirds)) == [1 / 3, 2 / 3, 1]
    words = "evaluations_per_epoch must be at most the steps of an epoch, which are 3, got 4: lower it"
    with pytest.raises(InputError, match=words):
        train(1, name="refused", **{**thirds, "evaluations_per_epoch": 4})


class Left(CountsEvaluations):
    """Is asked to stop in its first evaluation, once it has a link."""

    link: Link | None = None

    def forward(self, model, batch):
        if self.link and not (model.training or self.share.alone):
            self.link.stop_requested = True
        return super().forward(model, batch)


def test_an_evaluation_that_is_left_leaves_buffers_as_they_were(alone, tmp_path, monkeypatch):
    subject = make_subject(find_code(f"{__name__}:Left"), Settings(test_batch_size=4))

    def trained(name):
        link, here = Link(), Environment(choose_world("gloo", 1, 8), 0, 0, "env://", threads=1)
        monkeypatch.setattr(Left, "link", link if name == "stopped" else None)
        (tmp_path / name).mkdir(exist_ok=True)
        return run(here, link, job_in(tmp_path / name, subject, RunOptions())).digest

    with pytest.raises(StopRequested):
        trained("stopped")
    distributed.destroy_process_group()
    (tmp_path / "stopped").rename(tmp_path / "resumed")
    assert trained("resumed") == trained("whole")
