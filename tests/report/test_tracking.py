"""Weights & Biases and TensorBoard, told of a real training in a process of its own, and read back."""

import dataclasses
import json
import os
import re
import resource
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.attempt.run import training_run
from flyte_ddp.attempt.trained import continue_tensorboard_file, find_tracking_id
from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished, GradientsSeen, RunStarted, StepLogged
from flyte_ddp.flyte1 import platform
from flyte_ddp.report import wandb_run
from flyte_ddp.report.mlflow_run import to_mlflow_name
from flyte_ddp.report.record import RunFinished
from flyte_ddp.report.tensorboard import TensorBoard
from flyte_ddp.report.tracking import Tracking, choose_tracking, open_tracker
from flyte_ddp.settings import RunOptions
from tests.attempt.test_failures import local_task
from tests.engine.probe_recipes import Named
from tests.report.track import Told, in_tensorboard, tell_tracker, tensorboard_values
from tests.report.wandb_file import Logged
from tests.report.wandb_server import Server

KEY = "0123456789abcdefmarked" + "0" * 18  # as long as a real one


@pytest.fixture
def track(recorded, tmp_path):
    """track(options, **environment): what a tracker made of the recorded training."""
    return partial(tell_tracker, recorded, tmp_path)


def test_offline_run_is_what_was_trained(recorded, track):
    told = track({"tracking": "offline", "wandb_project": "some-project", "wandb_entity": "some-team"})
    run = told.run
    assert told.said == ""
    assert (run.run.run_id, run.run.project, run.run.entity) == (
        recorded.info.tracking_id, "some-project", "some-team",
    )  # fmt: skip
    for name, value in json.loads(recorded.info.settings.to_json()).items():
        if name not in ("backend", "precision", "dataset"):  # which say what became of "auto"
            assert run.config[name] == value
    assert (run.config["backend"], run.config["world_size"]) == ("gloo", 2)

    steps, epochs = recorded.of(StepLogged), recorded.of(EpochFinished)
    assert run.values("train/loss") == pytest.approx([step.measures["loss"] for step in steps])
    assert not any(name.startswith("gradient_norm/") for row in run.history for name in row)  # only on request
    assert run.values("weights_digest") == [epoch.digest for epoch in epochs]
    assert run.summary["weights_digest"] == recorded.events[-1].results[0].digest
    assert run.config["hardware"] == recorded.of(RunStarted)[0].ran_on[0]["hardware"]
    assert run.exit_code == 0
    assert run.system >= 1
    assert_gradients_and_topology(recorded, told)
    assert_table(recorded, run)


def assert_gradients_and_topology(recorded: Any, told: Told) -> None:
    run = told.run
    (seen, _), (started,) = recorded.of(GradientsSeen), recorded.of(RunStarted)
    for name, (counts, edges) in seen.histograms.items():
        assert run.values(f"gradients/{name}._type")[0] == "histogram"
        assert run.values(f"gradients/{name}.values")[0] == counts
        assert run.values(f"gradients/{name}.bins")[0] == pytest.approx(edges)
    files = next(told.logs.glob("wandb/offline-run-*/files"))
    graph = json.loads((files / run.summary["graph_0"]["path"]).read_text())
    assert [(n["name"], n["class_name"], n["num_parameters"]) for n in graph["nodes"]] == [
        (name, kind, [count]) for name, kind, count in started.layers
    ]


@pytest.mark.slow
def test_settings_and_measures_keep_their_names_where_a_tracker_has_the_same(recorded, tmp_path):
    info = dataclasses.replace(recorded.info, settings=Named(recipe="soup", device="oven"))
    events = [event for event in recorded.events if type(event) is not RunFinished]
    more = {"gradient_norm": 7.0}
    named = [
        dataclasses.replace(event, measures=event.measures | more) if isinstance(event, StepLogged) else event
        for event in events
    ]
    run = tell_tracker((info, named), tmp_path, {"tracking": "offline"}).run
    (started,) = recorded.of(RunStarted)
    assert (run.config["recipe"], run.config["run.recipe"]) == ("soup", recorded.info.recipe)
    assert (run.config["device"], run.config["run.device"]) == ("oven", started.device)
    assert run.config["backend"] == started.backend, "which auto stood for"

    info = dataclasses.replace(info, logs=tmp_path)
    tracking = Tracking(info, TensorBoard(info, print), tmp_path)
    for event in named:
        tracking(event)
    tracking.close()
    points = in_tensorboard(tmp_path)
    assert {value for _, value in points["train/gradient_norm"]} == {7.0}
    assert len(points["train/run.gradient_norm"]) == len(recorded.of(StepLogged))


def assert_table(recorded: Any, run: Logged) -> None:
    """Of the test batches 0-39, 40-79 and 80-95, at most 32 images each."""
    images, _ = open_split(recorded.info.data, "test")
    scores = np.load(recorded.events[-1].predictions_path)
    (path,) = (place for name, place in run.artifact.items() if name.endswith(".table.json"))
    table = json.loads(path.read_text())
    names = recorded.info.description.classes
    assert table["columns"] == ["id", "image", "guess", "truth", *(f"score_{name}" for name in names)]
    assert [row[0] for row in table["data"]] == [str(n) for n in [*range(32), *range(40, 72), *range(80, 96)]]
    for index, image, guess, _, *shown in table["data"]:
        with Image.open(run.artifact[image["path"]]) as picture:
            assert (np.asarray(picture) == images[int(index), 0]).all()
        assert guess == names[scores[int(index)].argmax()]
        assert shown == pytest.approx(np.exp(scores[int(index)]).tolist(), abs=1e-6)


def test_shown_images_are_the_tutorials():
    shown = wandb_run.shown_images(10_000, 1000)
    assert len(shown) == 320
    assert shown[:33] == [*range(32), 1000]


def test_online_run_reaches_the_server(recorded, track):
    with Server("answers") as server:
        told = track({"tracking": "auto"}, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    url = f"{server.url}/ent/proj/runs/{recorded.info.tracking_id}"
    assert told.urls == [url]
    assert f"Weights & Biases: {url}" in told.said
    upsert = server.variables[server.operations.index("UpsertBucket")]
    assert upsert["name"] == recorded.info.tracking_id, "a retry would continue this very run"
    losses = [row["train/loss"] for row in server.history if "train/loss" in row]
    assert losses == pytest.approx([step.measures["loss"] for step in recorded.of(StepLogged)])
    assert server.exit_code == 0
    everything = [told.said, json.dumps(server.variables), *map(repr, server.uploads.values())]
    assert KEY not in "".join(everything)
    assert not files_with(KEY, told.logs)


@pytest.mark.slow
def test_run_is_kept_where_the_server_is_silent(recorded, track, tmp_path):
    earlier = tmp_path / "tracked" / "wandb" / "run-20260101_000000-earlier" / "logs"  # of an attempt that was killed
    earlier.mkdir(parents=True)
    with Server("silent") as server:
        told = track({"tracking": "online"}, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url, WAIT_SECONDS="1")
    assert earlier.exists()
    assert_kept(recorded, told)


def test_run_is_kept_where_nobody_listens(recorded, track):
    with Server("answers") as server:
        pass  # its port is closed again
    told = track({"tracking": "online"}, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert_kept(recorded, told)


def test_online_without_a_key_is_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "WANDB_API_KEY" in wandb_run.explain_unreachable()


@pytest.mark.slow
def test_server_that_falls_silent_is_not_waited_for(recorded, track):
    with Server("stops") as server:
        told = track({"tracking": "online"}, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url, WAIT_SECONDS="3")
    assert told.said.count("wandb sync") == 1
    assert told.run.values("train/loss") == pytest.approx([step.measures["loss"] for step in recorded.of(StepLogged)])


def test_server_that_refuses_what_a_run_has_measured_is_said(recorded, track):
    with Server("refuses") as server:
        told = track({"tracking": "online"}, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    _, warning = told.said.splitlines()
    assert re.search("Weights & Biases is incomplete .The server has refused .*: wandb sync ", warning), told.said
    assert told.run.values("train/loss") == pytest.approx([step.measures["loss"] for step in recorded.of(StepLogged)])


def assert_kept(recorded: Any, told: Told) -> None:
    assert told.urls == []
    assert len(told.said.splitlines()) == 1, "said once, and without a traceback"
    assert "wandb sync" in told.said
    assert told.run.values("train/loss") == pytest.approx([step.measures["loss"] for step in recorded.of(StepLogged)])
    assert told.run.exit_code == 0
    assert KEY not in told.said
    assert not files_with(KEY, told.logs)


def files_with(text: str, folder: Path) -> Any:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_auto_needs_a_key(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert choose_tracking("auto") == "off"
    assert "WANDB_API_KEY" in capsys.readouterr().err
    (tmp_path / "netrc").write_text("machine example.org login user password é\n", encoding="latin-1")
    assert choose_tracking("auto") == "off"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert choose_tracking("auto") == "online"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_tracking("auto") == "offline"
    assert choose_tracking("online") == "online"
    assert KEY not in capsys.readouterr().err


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused(recorded, tracker, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker, None)
    info = dataclasses.replace(recorded.info, options=RunOptions(tracking=tracker))
    with pytest.raises(InputError, match=re.escape(f'not installed: pip install "flyte-ddp-training[{tracker}]"')):
        open_tracker(info, info.logs, print)


def test_names_are_made_fit_for_mlflow():
    assert to_mlflow_name("train/f1 (macro) @0.5") == "train/f1 _macro_ _0.5"
    assert to_mlflow_name("test/../a//b/./c/") == "test/a/b/c"
    assert to_mlflow_name("test/größe") == "test/größe"
    assert len(to_mlflow_name("test/" + 300 * "a")) == 250


def test_tensorboard_files_say_what_was_trained(recorded, track):
    told = track({"tracking": "tensorboard", "log_gradients": True})
    assert told.said == ""
    read = partial(tensorboard_values, told.logs)
    (seen, _) = recorded.of(GradientsSeen)
    ((_, first), _) = read("histograms")["gradients/conv1.weight"]
    assert first[:, 2].sum() == sum(seen.histograms["conv1.weight"][0]) == 500
    assert any(tag.startswith("predictions/1") for tag in read("images"))
    texts = read("text")
    assert f'"batch_size": {recorded.info.settings.batch_size}' in str(texts["hyperparameters"])
    assert [text.item().decode() for _, text in texts["weights_digest"]] == [
        epoch.digest for epoch in recorded.of(EpochFinished)
    ]
    assert float(texts["summary/total_seconds"][0][1].item()) == recorded.events[-1].total_seconds


def test_a_resumed_training_writes_no_step_twice_after_what_a_killed_one_has_left(recorded, tmp_path):
    (tmp_path / "whole").mkdir()
    whole = tell_tracker(recorded, tmp_path / "whole", {"tracking": "tensorboard"})
    count = recorded.events.index(recorded.of(StepLogged)[3])
    killed = tell_tracker((recorded.info, recorded.events[:count]), tmp_path, {"tracking": "tensorboard"})
    (file,) = (killed.logs / "tensorboard").glob("*/*")
    os.truncate(file, file.stat().st_size - 3)
    resumed = tell_tracker(recorded, tmp_path, {"tracking": "tensorboard"})
    assert [*(resumed.logs / "tensorboard").glob("*/*")] == [file]
    assert in_tensorboard(resumed.logs) == in_tensorboard(whole.logs)
    texts = tensorboard_values(resumed.logs, "text")
    assert len(texts["hyperparameters"]) == 1
    assert [step for step, _ in texts["summary/world"]] == [0, 10], "what each attempt has found"


def test_a_local_attempt_goes_on_with_the_file_of_one_that_was_killed(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    folders, key = [], "0123456789abcdef"
    for events in (recorded.events[:5], recorded.events):
        with (
            suppress(KeyboardInterrupt),
            local_task(),
            training_run(platform, "digits", "0123456789abcdef", True) as run,
        ):
            info = dataclasses.replace(
                recorded.info,
                logs=run.logs.folder,
                tracking_id=find_tracking_id(platform, key, run.store.path),
                options=RunOptions(tracking="tensorboard"),
            )
            continue_tensorboard_file(platform, run, info)
            tracker = Tracking(info, TensorBoard(info, print), tmp_path)
            run.store.path.touch()  # the checkpoint, without which nothing is resumed
            for event in events:
                tracker(event)
            tracker.close()
            folders.append(run.logs.folder)
            if events is not recorded.events:
                raise KeyboardInterrupt
    assert not folders[0].exists()
    steps = [step for step, _ in in_tensorboard(folders[1])["train/loss"]]
    assert steps == [one.epoch * 10 + one.step for one in recorded.of(StepLogged)]
    assert len([*(folders[1] / "tensorboard").iterdir()]) == 1


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # the traceback of a thread
def test_tensorboard_on_a_full_disk_is_one_line(recorded, tmp_path, capsys):
    info = dataclasses.replace(recorded.info, logs=tmp_path, options=RunOptions(tracking="tensorboard"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        tracker = open_tracker(info, tmp_path, print)
        assert tracker
        for event in recorded.events[:-1]:
            tracker(event)
        tracker.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"TensorBoard is incomplete .OSError: .*lost: \d+ events", line)
