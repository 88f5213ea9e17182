"""All trackers have the same values under the same names at the same steps, after a kill too."""

import dataclasses
from typing import Any

import pytest

from flyte_ddp.events import EpochChosen, EpochFinished, GradientsSeen, RunStarted, StepLogged
from flyte_ddp.report.console import Console
from flyte_ddp.report.mlflow_run import ADDRESS
from flyte_ddp.report.record import Record
from flyte_ddp.report.report import fragment
from flyte_ddp.report.tensorboard import TensorBoard
from flyte_ddp.report.tracking import TRACKERS, Tracking
from flyte_ddp.settings import TRACKING
from tests.report.test_tracking import KEY
from tests.report.track import Points, in_mlflow, in_tensorboard, in_wandb, tell_tracker
from tests.report.wandb_server import Server

CHOSEN = {"loss": 1.25, "accuracy": 0.625}


@pytest.fixture(params=["tensorboard", "offline", pytest.param("mlflow", marks=pytest.mark.slow)])
def tracked(request, recorded, tmp_path):
    """tracked(events, end): the points that a tracker has after each attempt."""
    options, address = {"tracking": request.param, "log_gradients": True}, f"sqlite:///{tmp_path}/mlflow.db"
    if request.param == "mlflow":
        pytest.importorskip("mlflow.store", reason="mlflow is not installed: uv pip install 'mlflow>=3'")

    def tracked(events: list[Any], end: str = "closed") -> Points:
        told = tell_tracker((recorded.info, events), tmp_path, options, end, **{ADDRESS: address})
        if request.param == "tensorboard":
            return in_tensorboard(told.logs)
        if request.param == "offline":
            return in_wandb(told.run.history)
        return in_mlflow(address, recorded.info.tracking_id)

    tracked.tracking = request.param  # type: ignore[attr-defined]
    return tracked


def expected(events: list[Any]) -> Points:
    """What docs/reference.md promises."""
    points: Points = {}

    def log(step: int, group: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            points.setdefault(f"{group}{name}", []).append((step, value))

    for event in events:
        if isinstance(event, StepLogged):
            step = event.epoch * 10 + event.step
            log(step, "train/", event.measures)
            log(
                step,
                "train/",
                {name: getattr(event, name) for name in ("learning_rate", "samples_per_second", "peak_memory_gib")},
            )
            log(step, "", {"train/gradient_norm": event.gradient_norm, "epoch": step / 10})
            log(step, "gradient_norm/", event.gradient_norms)
        elif isinstance(event, EpochFinished):
            step = round(event.position * 10)
            log(step, "train_epoch/", event.train)
            log(step, f"{event.split}/", event.evaluated)
            log(step, "seconds/", {"train": event.train_seconds, "evaluate": event.evaluate_seconds})
        elif isinstance(event, EpochChosen):
            log(20, "test/", event.measures)
    return points


def assert_same(points: Points, wanted: Points) -> None:
    assert points.keys() == wanted.keys()
    for name, values in wanted.items():
        assert [step for step, _ in points[name]] == [step for step, _ in values], name
        assert [value for _, value in points[name]] == pytest.approx([value for _, value in values]), name


def validated(recorded: Any) -> list[Any]:
    """The recorded events as of a training with a validation split, with a measure that no other training has."""
    events = []
    for event in recorded.events:
        if isinstance(event, StepLogged):
            event = dataclasses.replace(event, measures={**event.measures, "brand new": 0.5})
        elif isinstance(event, EpochFinished):
            event = dataclasses.replace(event, validation=event.test, test={})
        events.append(event)
    chosen = EpochChosen(0, 2, CHOSEN, stopped_early=False, seconds=0.1)
    return [*events[:-1], chosen, events[-1]]


def test_every_choice_has_a_tracker():
    assert {*TRACKING} == {"auto", "off", *TRACKERS}


def test_names_and_steps_are_the_same_in_all(recorded, tracked):
    events = validated(recorded)
    assert_same(tracked(events), expected(events))


def attempts_of(events: list[Any], position: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """The events of an attempt that is killed after step 15, and of the one that goes on from the position.

    At (0, 10) a checkpoint has the last step of the epoch, but not its evaluation.
    """
    started, others = events[0], events[1:]
    steps = [event for event in others if isinstance(event, StepLogged)]
    first = others[: others.index(steps[2]) + 1]
    at = position[0] * 10 + position[1]
    kinds = EpochFinished, GradientsSeen
    after = [
        one
        for one in others
        if not (isinstance(one, StepLogged) and one.epoch * 10 + one.step <= at)
        and not (isinstance(one, kinds) and (one.epoch + 1, 0) <= position)
    ]
    again = dataclasses.replace(started, first_epoch=position[0], first_step=position[1])
    return [started, *first], [again, *after]


@pytest.mark.parametrize("position", [(0, 7), (0, 10), (1, 0)])
def test_an_attempt_after_a_kill_neither_doubles_nor_loses_a_step(recorded, tracked, position):
    if tracked.tracking == "offline":
        pytest.skip("each attempt writes a run of its own, for `wandb sync`")
    events = validated(recorded)
    killed, again = attempts_of(events, position)
    tracked(killed, "killed")
    assert_same(tracked(again), expected(events))


def test_ranks_that_start_again_in_the_same_process_double_and_lose_nothing(recorded, tracked):
    events = validated(recorded)
    first, again = attempts_of(events, (0, 7))
    assert_same(tracked([*first, *again]), expected(events))


@pytest.mark.parametrize("position", [(0, 10), (1, 5)])
def test_a_wandb_run_goes_on_where_the_server_has_it(recorded, tmp_path, position):
    events = validated(recorded)
    with Server("answers") as server:
        for attempt in attempts_of(events, position):
            options = {"tracking": "online", "log_gradients": True}
            told = tell_tracker(
                (recorded.info, attempt), tmp_path, options, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url
            )
            assert "incomplete" not in told.said
    assert_same(in_wandb(server.history), expected(events))
    assert [row["weights_digest"] for row in server.history if "weights_digest" in row] == [
        event.digest for event in events if isinstance(event, EpochFinished)
    ]


def test_another_training_into_the_same_folder_is_another_run_of_tensorboard(recorded, tmp_path):
    """As a call of train() with other settings and the same output."""
    options = {"tracking": "tensorboard", "log_gradients": True}
    for tracking_id in ("ffffffff-1", "00000000-2"):
        info = dataclasses.replace(recorded.info, tracking_id=tracking_id)
        logs = tell_tracker((info, recorded.events), tmp_path, options).logs
    assert_same(in_tensorboard(logs, "ffffffff-1"), expected(recorded.events))
    assert_same(in_tensorboard(logs, "00000000-2"), expected(recorded.events))


def test_what_a_script_tells_of_one_step_in_several_lines_is_logged_once_each(recorded, tmp_path):
    step = recorded.of(StepLogged)[0]
    info = dataclasses.replace(recorded.info, logs=tmp_path)
    tracking = Tracking(info, TensorBoard(info, print), tmp_path)
    tracking(recorded.of(RunStarted)[0])
    for measures in ({"loss": 2.0}, {"val_loss": 3.0}, {"loss": 4.0}):
        tracking(dataclasses.replace(step, measures=measures))
    tracking.close()
    points = in_tensorboard(tmp_path)
    assert (points["train/loss"], points["train/val_loss"]) == ([(step.step, 2.0)], [(step.step, 3.0)])


def test_a_number_that_a_step_has_under_a_new_name_is_everywhere(recorded, tmp_path, capsys):
    kind: Any = dataclasses.make_dataclass("StepLogged", [("skipped_steps", int, 3)], bases=(StepLogged,), frozen=True)
    steps = [kind(**{**vars(one), "measures": {**one.measures, "brand new": 0.5}}) for one in recorded.of(StepLogged)]
    info, record, console = dataclasses.replace(recorded.info, logs=tmp_path), Record(recorded.info), Console()
    tracking = Tracking(info, TensorBoard(info, print), tmp_path)
    for event in (recorded.of(RunStarted)[0], *steps):
        for observer in (record, console, tracking):
            observer(event)
    tracking.close()
    assert in_tensorboard(tmp_path)["train/skipped_steps"] == [(step, 3) for step in (5, 10, 15, 20)]
    page = fragment(record)
    assert "<figcaption>Skipped steps</figcaption>" in page
    assert "<figcaption>Brand new</figcaption>" in page
    assert "\tBrand new: 0.5" in capsys.readouterr().err
