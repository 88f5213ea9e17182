"""MLflow, told of a real training, with a real server on this host, and with some that are of no use."""

import dataclasses
import json
import math
import signal
from functools import partial
from pathlib import Path

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished, RunStarted, StepLogged
from flyte_ddp.report import mlflow_run
from flyte_ddp.report.background import IncompleteError
from flyte_ddp.report.mlflow_run import ADDRESS, STEPS, MlflowRun
from flyte_ddp.report.record import RunFailed
from flyte_ddp.report.tracking import Tracking
from tests.commands import ROOT, free_port, pyflyte_process
from tests.report.mlflow_server import serving
from tests.report.track import tell_tracker
from tests.report.wandb_server import Server

pytest.importorskip("mlflow.server", reason="mlflow and its server are not installed: uv pip install 'mlflow>=3'")
pytestmark = pytest.mark.slow
TRACKED = {"tracking": "mlflow", "log_gradients": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def track(recorded, tmp_path):
    """track(options, **environment): what a tracker made of the recorded training."""
    return partial(tell_tracker, recorded, tmp_path)


@pytest.fixture
def attempt(recorded, server, tmp_path, monkeypatch, request):
    """attempt(url, **facts): a run of the recorded training in this process, which sends each event at once."""
    monkeypatch.setattr(mlflow_run, "SEND_SECONDS", 0)
    monkeypatch.setattr(mlflow_run, "RETRY_SECONDS", 0)
    (tmp_path / "report.html").write_text("the report")

    def attempt(url=server.url, **facts):
        monkeypatch.setenv(ADDRESS, url)
        info = dataclasses.replace(recorded.info, **{"tracking_id": request.node.name, **facts})
        return Tracking(info, MlflowRun(info, print), tmp_path)

    return attempt


def test_run_is_what_was_trained(recorded, track, server, tmp_path):
    (tmp_path / "report.html").write_text("the report")
    told = track({**TRACKED, "mlflow_experiment": "some project"}, **{ADDRESS: server.url})
    run = server.run(recorded.info.tracking_id, "some project")
    place = f"{server.url}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert (told.urls, told.said) == ([place], f"MLflow: {place}\n")
    assert (run.info.status, run.info.run_name) == ("FINISHED", recorded.info.name)
    settings = json.loads(recorded.info.settings.to_json())
    assert {name: run.data.params[name] for name in settings} == {name: str(value) for name, value in settings.items()}
    assert run.data.params["data_digest"] == recorded.info.description.digest
    assert (run.data.tags["world_size"], run.data.tags["backend"]) == ("2", "gloo")
    steps, epochs = recorded.of(StepLogged), recorded.of(EpochFinished)
    losses = [(step.epoch * 10 + step.step, step.measures["loss"]) for step in steps]
    assert server.points(run, "train/loss") == losses
    assert [value for _, value in server.points(run, "test/accuracy")] == [one.test["accuracy"] for one in epochs]
    assert len(server.points(run, "gradient_norm/conv1.weight")) == len(steps)
    assert [file.path for file in server.client.list_artifacts(run.info.run_id)] == ["report.html"]


def test_an_attempt_goes_on_with_the_run_of_one_that_was_killed(recorded, server, attempt, request):
    """Its process takes other ranks, and repeats a step that had been logged."""
    (started,), (first, *others) = recorded.of(RunStarted), recorded.of(StepLogged)
    killed = attempt()
    for event in (started, first, others[0]):
        killed(event)
    again = attempt(name="another-name")
    for event in (dataclasses.replace(started, world_size=3), first, *others):
        again(event)
    again(RunFailed("no file \udcff" + 9000 * "x"))
    again.close()
    run = server.run(request.node.name)
    assert [step for step, _ in server.points(run, "train/loss")] == [5, 10, 15, 20]
    assert run.info.status == "FAILED"
    assert run.data.tags["failure"].startswith("no file \\udcffxxx")
    assert (run.data.tags["world_size"], run.info.run_name) == ("3", recorded.info.name)


def test_a_step_of_which_a_killed_attempt_sent_a_part_is_sent_whole(recorded, server, attempt, request, monkeypatch):
    monkeypatch.setattr(mlflow_run, "MOST_METRICS", 2)
    (started,), (step, *_) = recorded.of(RunStarted), recorded.of(StepLogged)
    step = dataclasses.replace(step, measures={"loss": 1.0, "error": 2.0, "more": 3.0})
    killed = attempt()
    killed(started)
    client = killed._tracker._client
    send, left = client.log_batch, iter(range(1))

    def log_batch(*given, **named):
        next(left)  # fails from the second time on
        return send(*given, **named)

    client.log_batch = log_batch
    killed(step)
    again = attempt()
    for event in (started, step):
        again(event)
    again.close()
    assert server.points(server.run(request.node.name), "train/more") == [(5, 3.0)]


def test_measures_that_mlflow_would_refuse(recorded, server, attempt, request):
    """Of any number, name and value; and a setting that is longer than it takes."""
    settings = dataclasses.replace(recorded.info.settings, freeze=7000 * "x")
    tracker = attempt(settings=settings)
    (started,), (step, *_) = recorded.of(RunStarted), recorded.of(StepLogged)
    many = {f"measure {number}@k": float(number) for number in range(2500)}
    values = {**many, "nan": math.nan, "inf": math.inf, "f1 (%) *": 0.5, "../up//": 0.25, 400 * "long": 1.0, "": 2.0}
    tracker(started)
    tracker(dataclasses.replace(step, measures=values))
    tracker.close()
    run = server.run(request.node.name)
    assert math.isnan(run.data.metrics["train/nan"])
    assert run.data.metrics["train/inf"] > 1e300
    assert {name: run.data.metrics[name] for name in ("train/f1 ___ _", "train/up", "train")} == {
        "train/f1 ___ _": 0.5, "train/up": 0.25, "train": 2.0,
    }  # fmt: skip
    assert run.data.metrics["train/measure 2499_k"] == 2499
    of_training = [name for name in run.data.metrics if name.startswith("train")]
    assert len(of_training) == len(values) + 3, "and the learning rate, speed and norm"
    assert run.data.params["freeze"].startswith("xxx")
    assert "characters left out" in run.data.params["freeze"]


def test_the_users_own_run_stays_theirs(recorded, server, attempt, request, tmp_path):
    import mlflow

    address = f"sqlite:///{tmp_path}/own.db"
    mlflow.set_tracking_uri(address)
    try:
        with mlflow.start_run() as own:
            tracker = attempt()
            for event in recorded.events:
                tracker(event)
            tracker.close()
            mlflow.log_metric("own", 1)
            assert mlflow.active_run().info.run_id == own.info.run_id
        found = mlflow.get_run(own.info.run_id)
        assert (mlflow.get_tracking_uri(), found.data.metrics, found.data.params) == (address, {"own": 1}, {})
    finally:
        mlflow.set_tracking_uri(None)
    assert server.run(request.node.name).info.status == "FINISHED"


@pytest.mark.parametrize(("dies", "says"), [(signal.SIGKILL, "Connection refused"), (signal.SIGSTOP, "Read timed out")])
def test_what_a_server_that_dies_has_not_taken_is_sent_when_it_is_back(
    recorded, attempt, tmp_path, monkeypatch, request, dies, says
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    (started,), steps = recorded.of(RunStarted), recorded.of(StepLogged)
    with serving(tmp_path) as first:
        tracker = attempt(first.url)
        for event in (started, steps[0]):
            tracker(event)
        first.send(dies)
        for event in steps[1:]:
            tracker(event)
        with pytest.raises(IncompleteError, match=rf"^\d+ measures and the report could not be sent: .*{says}"):
            tracker.close()
    with serving(tmp_path, first.port) as second:
        tracker.close()
        run = second.run(request.node.name)
        assert [step for step, _ in second.points(run, "train/loss")] == [5, 10, 15, 20]
        assert json.loads(run.data.tags[STEPS])["train"] == 20
        assert second.client.list_artifacts(run.info.run_id)


@pytest.mark.parametrize("mood", ["forbids", "fails", "silent", "gone"])
def test_a_server_of_no_use_costs_nothing_but_a_remark(track, mood):
    """For each mood the process ends by itself, although nothing could be sent."""
    with Server(mood) as server:
        url = server.url if mood != "gone" else f"http://127.0.0.1:{free_port()}"
        told = track(TRACKED, **{ADDRESS: url.replace("//", "//me:secret@")})
    first, last = told.said.splitlines()
    assert first.startswith("MLflow is not available (")
    assert last.startswith("Warning: MLflow is incomplete (")
    assert last.endswith("Training was not affected.")
    assert "measures and the report could not be sent" in last
    assert "secret" not in told.said


def test_mlflow_needs_an_address(recorded, monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    with pytest.raises(InputError, match=f"set {ADDRESS}"):
        MlflowRun(recorded.info, print)


def test_report_and_model_card_of_a_local_run_are_with_its_run(server, tmp_path):
    hp = json.dumps({"dataset": "digits", "epochs": 1, "train_fraction": 0.3})
    options = json.dumps({"tracking": "mlflow"})
    command = [str(ROOT / "workflows" / "mnist.py"), "pytorch_training_wf", "--hp", hp, "--options", options]
    place = {"HOME": str(tmp_path), "DDP_DATA_DIR": str(tmp_path / "data"), "DDP_RUNS_DIR": str(tmp_path / "runs")}
    done = pyflyte_process(*command, cwd=tmp_path, environment={**place, ADDRESS: server.url})
    (url,) = {line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith("MLflow: ")}
    assert f"tracking_url='{url}'" in done.stdout
    assert "incomplete" not in done.stderr
    (folder,) = (tmp_path / "runs").glob("2*")
    exporting = [str(ROOT / "workflows" / "export.py"), "export_wf", "--model_state", str(folder / "model.pt")]
    exporting += ["--options", json.dumps({"formats": "safetensors"})]
    pyflyte_process(*exporting, cwd=tmp_path, environment={**place, ADDRESS: server.url})
    files = {file.path for file in server.client.list_artifacts(url.rpartition("/")[2])}
    assert files == {"report.html", "model_card.html", "model_card.md"}
    kept = Path(server.client.download_artifacts(url.rpartition("/")[2], "report.html", str(tmp_path)))
    assert kept.read_bytes() == (folder / "report.html").read_bytes()
    assert url in kept.read_text()
