"""Observers of a user's own: told by the methods that they have, and unable to hurt the run."""

import dataclasses

from flyte_ddp.code.user_code import find_code
from flyte_ddp.events import EpochFinished, Printed
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.observers import Observers
from flyte_ddp.report.record import RunFailed
from tests.report import listeners


def test_own_observers_hear_events_and_one_that_raises_is_said_once_and_dropped(recorded, tmp_path, capsys):
    own = [find_code(f"tests.report.listeners:{name}") for name in ("Notes", "Fails", "CannotBeMade")]
    info = dataclasses.replace(recorded.info, logs=tmp_path)
    observers = Observers(info, Goodput(0.0), own=own, on_event=lambda event: None)
    epochs = [EpochFinished(epoch, 10, {}, {"loss": epoch + 0.5}, 1.0, 1.0) for epoch in (0, 1)]
    for event in (recorded.events[0], epochs[0], Printed(0, "unheard"), epochs[1]):
        observers(event)
    observers.end(RunFailed("it broke"))
    assert listeners.NOTED == [0.5, 1.5, "it broke"]
    assert epochs[0].test == {"loss": 0.5}, "the others' event stays as it is"
    said = capsys.readouterr().err
    assert said.count("observer tests.report.listeners:Fails") == 1
    assert "Warning: observer tests.report.listeners:Fails gave up: SystemExit: epoch 0. Training was not" in said
    assert "Warning: observer tests.report.listeners:CannotBeMade is incomplete (TypeError: " in said
