"""When a training is said not to learn."""

import math

import pytest

from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.events import EpochFinished, NotLearning

LOG10 = math.log(10)


def monitored(losses, samples=1280, epoch=0, constant_loss=LOG10):
    monitor = LossMonitor(constant_loss)
    for step, loss in enumerate(losses, 1):
        monitor.after_steps(epoch, step, loss, samples)
    return monitor


def evaluated(epoch, loss, fraction=1.0):
    return EpochFinished(epoch, 10, {}, {"loss": loss}, 1.0, 1.0, fraction=fraction)


def test_a_loss_that_falls_is_no_leap_and_neither_is_one_that_wavers():
    assert monitored([2.3, 1.9, 0.6, 0.9, 0.2, 0.01, 0.4, 0.02]).warnings == []


def test_leaps_are_measured_by_the_size_of_a_negative_constant_loss():
    monitor = monitored([-1.0, -1.5, -1.4, -1.9, -1.0], constant_loss=-2.0)
    assert [warning.step for warning in monitor.warnings] == [5]


def test_a_leap_is_told_once_with_the_step_and_the_losses():
    (warning,) = monitored([2.3, 0.3, 0.05, 2.31, 2.3, 2.3]).warnings
    assert (warning.epoch, warning.step) == (0, 4)
    assert warning.reason.startswith("the loss leapt from 0.05 to 2.31 by step 4 of epoch 1: lower learning_rate")


def test_a_second_leap_is_told_too():
    assert [warning.step for warning in monitored([0.1, 2.0, 0.1, 2.0]).warnings] == [2, 4]


def test_a_few_hard_samples_are_no_leap():
    assert monitored([0.01] * 99 + [2.5], samples=10).warnings == []


def test_steps_without_a_loss_are_not_compared_with():
    (warning,) = monitored([0.05, math.nan, 2.0]).warnings
    assert "the loss leapt from 0.05 to 2" in warning.reason


def test_a_measure_that_is_not_finite_is_told_once_for_each_split():
    monitor = LossMonitor(LOG10)
    told = [
        monitor.warn_of_not_finite(["f1"], split, epoch, 9)
        for split, epoch in (("validation", 1), ("validation", 2), ("test", 2))
    ]
    assert [len(warnings) for warnings in told] == [1, 0, 1]
    assert (told[0][0].epoch, told[2][0].epoch) == (0, 1)
    assert "f1 on the test split is not finite after epoch 2" in monitor.warnings[1].reason


def test_guessing_is_told_when_it_begins():
    monitor = LossMonitor(LOG10)
    losses = [2.35, LOG10, 0.5, 2.3, 0.5]
    reported = [bool(monitor.after_evaluation(evaluated(epoch, loss), 100)) for epoch, loss in enumerate(losses)]
    assert reported == [True, False, False, True, False]


@pytest.mark.parametrize(("epochs", "first"), [(20, 1), (300, 2)])
def test_guessing_at_the_very_start_of_a_training_is_no_news(epochs, first):
    monitor = LossMonitor(LOG10, epochs=epochs)
    reported = [bool(monitor.after_evaluation(evaluated(epoch, LOG10), 100)) for epoch in range(5)]
    assert reported == [epoch == first for epoch in range(5)]


def test_a_resumed_watch_goes_on_where_it_was():
    monitor = monitored([2.3, 0.1, 2.0])
    again = LossMonitor(LOG10)
    again.load_state_dict(monitor.state_dict())
    assert again == monitor


def test_samples_that_are_all_alike_tell_nothing():
    assert LossMonitor(0.0).after_evaluation(evaluated(0, 0.0), 1) == []


def test_without_a_constant_loss_the_first_window_and_mismatched_outputs_stand_in():
    monitor = LossMonitor()
    assert monitor.after_steps(0, 1, 5.0, 5000) == monitor.after_steps(0, 2, 6.0, 5000) == []
    (leapt,) = monitor.after_steps(0, 3, 7.0, 5000)
    assert leapt.reason.startswith("the loss leapt from 5 to 7 by step 3")
    assert monitor.after_evaluation(evaluated(0, 2.0), 3, guessing_loss=3.0) == []
    (guessing,) = monitor.after_evaluation(evaluated(1, 2.99, 0.25), 3, guessing_loss=3.0)
    assert "no better than guessing after epoch 1.25: the loss is 2.99, and 3 for predictions that" in guessing.reason


def test_what_is_found_at_a_start_is_kept_when_training_goes_on():
    earlier, monitor = monitored([0.1, 2.0]), LossMonitor(LOG10)
    found = NotLearning(0, 0, "the result depends on the number of ranks")
    monitor.warnings.append(found)
    monitor.load_state_dict(earlier.state_dict())
    assert monitor.warnings == [*earlier.warnings, found]
    again = LossMonitor(LOG10, warnings=[found])
    again.load_state_dict(monitor.state_dict())
    assert again.warnings == monitor.warnings
