"""Two trainings are compared by what they have written: from when on their bits differ, and in what they do."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from flyte_ddp.__main__ import main
from flyte_ddp.engine.monitor.trace import FILE
from flyte_ddp.events import EpochFinished, RunStarted, StepLogged
from flyte_ddp.report.progress import ProgressFile
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings


def compare(*places):
    done = CliRunner().invoke(main, ["compare", *map(str, places)])
    return done.exit_code, done.stdout.splitlines() if done.exit_code < 2 else done.stderr


@pytest.fixture
def written(recorded, tmp_path):
    """written(name, **changes): the folder of a run of the recorded events, each changed by its type's name."""

    def write(name, **changes):
        (tmp_path / name / "logs").mkdir(parents=True)
        progress = ProgressFile(tmp_path / name / "logs", name)
        for event in (event for event in recorded.events if not isinstance(event, StepLogged)):
            for changed in changes.get(type(event).__name__, lambda event: [event])(event):
                progress(changed)
        return tmp_path / name

    return write


def on_other(event, **machine):
    return dataclasses.replace(event, ran_on=[{**event.ran_on[0], **machine}])


def of_settings(event, **settings):
    return dataclasses.replace(event, identity={**event.identity, "settings": settings})


def without_digest(event):
    return [dataclasses.replace(event, digest="")]


def from_second_on(event):
    return [dataclasses.replace(event, digest="0" * 16) if event.epoch else event]


def of_another_model(event):
    return [dataclasses.replace(event, results=[dataclasses.replace(event.results[0], digest="f" * 16)])]


def test_equal_ones_are_equal_whatever_they_ran_on(recorded, written):
    one, other = written("one"), written("other", RunStarted=lambda event: [on_other(event, ranks=3, hardware="H100")])
    model = recorded.events[-1].results[0].digest
    status, said = compare(one, one / "logs")
    assert status == 0
    assert said == [
        f"{one}: 2 evaluations, model.pt {model}",
        f"{one / 'logs'}: 2 evaluations, model.pt {model}",
        "The weights are equal at the 2 evaluations that both have, and in model.pt",
        "Settings, data, code, init, hardware, torch, precision, ranks and threads are the same",
    ]
    status, said = compare(one, other / "logs" / "progress.jsonl")
    hardware = recorded.of(RunStarted)[0].ran_on[0]["hardware"]
    assert status == 0
    assert said[3:] == ["These differ:", f"  ran on: hardware: {hardware} | H100", "  ran on: ranks: 2 | 3"]


def test_others_differ_from_an_evaluation_on_and_in_what_is_named(recorded, written):
    settings = recorded.of(RunStarted)[0].identity["settings"]

    def faster(event):
        return [of_settings(event, **{**settings, "learning_rate": 0.5, "new": "x"})]

    one = written("one")
    status, said = compare(one, written("other", EpochFinished=from_second_on, RunStarted=faster))
    assert status == 1
    assert said[2:] == [
        "The weights are equal up to epoch 1 and differ from the next evaluation, epoch 2, on",
        "To find the first step and layer that differ, train both again with the option trace_every",
        "These differ:",
        f"  learning_rate: {settings['learning_rate']} | 0.5",
        '  new: unknown | "x"',
    ]
    status, said = compare(written("late", RunFinished=of_another_model), one)
    assert status == 1
    assert said[2] == "The weights are equal at the 2 evaluations that both have, but those of model.pt differ"


def test_traces_of_different_networks_leave_the_settings_to_be_compared(recorded, written):
    settings = recorded.of(RunStarted)[0].identity["settings"]
    deeper = written(
        "deeper",
        EpochFinished=from_second_on,
        RunStarted=lambda event: [of_settings(event, **{**settings, "depth": 9})],
    )
    one = written("one")
    for folder, names in ((one, ["fc1.weight"]), (deeper, ["fc1.weight", "fc2.weight"])):
        step = {"epoch": 0, "step": 0, "number": 0, "weights": [(name, "0" * 16) for name in names]}
        (folder / "logs" / FILE).write_text(json.dumps({**step, "parts": [], "gradients": []}) + "\n")
    status, said = compare(one, deeper)
    assert status == 1
    assert said[3:] == [
        "The traces are of different networks: only one has the weights fc2.weight",
        "These differ:",
        "  depth: unknown | 9",
    ]


def test_one_that_has_not_finished_is_not_equal(written):
    whole = written("whole")
    status, said = compare(whole, written("stopped", RunFinished=lambda event: []))
    assert status == 1
    assert said[1].endswith("stopped: 2 evaluations, not finished")
    assert said[2].endswith("but one goes further, or has not finished")
    shorter = written("shorter", EpochFinished=lambda event: [event] * (event.epoch == 0))
    assert compare(shorter, whole)[0] == 1
    begun = written("begun", EpochFinished=lambda event: [], RunFinished=lambda event: [])
    assert compare(begun, whole)[1][2] == "There is no evaluation that both have"


def test_one_that_went_on_elsewhere_is_known_from_its_start(recorded, written):
    first, second = recorded.of(EpochFinished)

    def goes_on(event):
        machines = [event.ran_on[0], {**event.ran_on[0], "hardware": "H100"}]
        earlier = [(first.position, first.digest)]
        return [dataclasses.replace(event, first_epoch=1, ran_on=machines, earlier=earlier)]

    resumed = written("resumed", RunStarted=goes_on, EpochFinished=lambda event: [event] * (event == second))
    status, said = compare(written("one"), resumed)
    assert status == 0
    assert said[-1].endswith(", then H100")

    def starts_again(event):  # its checkpoint was lost: what came before does not count
        return [event, dataclasses.replace(first, digest="0" * 16), event]

    assert compare(resumed, written("again", RunStarted=starts_again))[0] == 0


def test_what_is_no_run_is_one_error(written, tmp_path):
    one = written("one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "progress.jsonl").write_text("<html>\n")
    (tmp_path / "newer.jsonl").write_text(json.dumps({"event": "started", "format": 99}) + "\n")
    for place, words in (
        (tmp_path / "empty", "cannot be read"),
        (tmp_path / "nowhere", "cannot be read"),
        (tmp_path / "progress.jsonl", "is not the progress of a training"),
        (tmp_path / "newer.jsonl", "that this version knows"),
        (written("older", EpochFinished=without_digest), "has no digests"),
        (written("unstarted", RunStarted=lambda event: []), "has no digests"),
    ):
        status, said = compare(one, place)
        assert status == 2
        assert words in said
        assert "Traceback" not in said
    assert compare(one)[0] == 2


def test_trainings_by_a_plain_call_are_compared_too(tmp_path):
    """Their folder may be trained into again: the latest counts."""
    options = RunOptions(nproc=1, tracking="off")
    for seed, name in ((1, "one"), (2, "one"), (1, "other")):
        given = Settings(seed=seed, batch_size=16, epochs=1)
        result = train("tests.engine.sharding_recipes:Sharded", given, options, output=tmp_path / name)
    status, said = compare(tmp_path / "one", tmp_path / "other")
    assert status == 1
    assert said[1] == f"{tmp_path / 'other'}: 1 evaluation, model.pt {result.digest}"
    assert said[2] == "The weights differ from the first evaluation, epoch 1, on"
    assert said[4:] == ["These differ:", "  seed: 2 | 1"]
    assert compare(tmp_path / "other", tmp_path / "other")[0] == 0
