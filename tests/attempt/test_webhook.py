"""A webhook on loopback that is told of failed trainings, and those that do not listen."""

import json
import platform as machine
import re
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from flyteidl.core.execution_pb2 import WorkflowExecution
from flytekit import Secret
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.attempt import webhook
from flyte_ddp.attempt.failures import attempt_error, to_failure
from flyte_ddp.attempt.pod import GPUS_VARIABLE
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.platform import TaskInterruptedError
from flyte_ddp.flyte1.recipe import RecipeTraining
from flyte_ddp.flyte1.train import image_training
from flyte_ddp.launch.failures import Failure, PreemptedError, RankError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions, TrainingSettings
from scripts import dry_run
from tests.packages import SANDBOX, full_package, sandbox_package
from tests.pod import Pod, container_of, literal, package, package_for_here, small_dataset

DEFAULT_PHASES = ["FAILED", "TIMED_OUT", "ABORTED"]
TOKEN = "a-token-that-is-not-shown"


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Webhook)
        self.posted: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Webhook(BaseHTTPRequestHandler):
    """Answers with the status that its path begins with."""

    server: Server

    def do_POST(self):
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def bad_server():
    """Begins an answer that never ends."""
    listening, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve():
        connection, _ = listening.accept()
        with connection:
            while not ended.wait(0.2):
                connection.send(b"H")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/{TOKEN}"
    finally:
        ended.set()
        thread.join()
        listening.close()


@pytest.mark.slow
def test_a_failed_pod_says_rank_host_cause_and_where_the_logs_are_and_tells_the_webhook(server, tmp_path):
    task = package_for_here().tasks["workflows.mnist.pytorch_mnist_task"]
    inputs = {
        "hp": literal(Hyperparameters(learning_rate=1e30)),
        "data": small_dataset(tmp_path / "data"),
        "options": literal(RunOptions()),
    }
    flytes = {
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "shop",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "production",
        "FLYTE_INTERNAL_EXECUTION_ID": "a1b2c3",
        "FLYTE_ATTEMPT_NUMBER": "1",
        "DDP_WEBHOOK": f"{server.url}/200",
        "DDP_CONSOLE": "https://flyte.example.org/console/",
    }
    pod = Pod(task, inputs, tmp_path / "pod", environment=flytes)
    pod.finish_here()
    _, _, first, second, *_ = pod.error.error.message.splitlines()
    assert re.search(rf"TaskError: rank \d on {machine.node()}: NonFiniteError: loss is not finite in epoch 1", first)
    logs = tmp_path / "pod" / "raw" / "logs"
    assert second.strip() == f"Logs: {logs}"
    assert "NonFiniteError" in (logs / "console.log").read_text()
    assert "NonFiniteError" in (logs.parent / "report.html").read_text()
    (posted,) = server.posted
    link = "https://flyte.example.org/console/projects/shop/domains/production/executions/a1b2c3"
    assert posted.pop("rank") in (0, 1)
    assert posted.pop("message").startswith("loss is not finite in epoch 1")
    assert posted.pop("text").endswith(f"\n{link}")
    assert posted.pop("time")
    assert posted == {
        "format": 1,
        "event": "training_failed",
        "host": machine.node(),
        "cause": "NonFiniteError",
        "recoverable": False,
        "attempt": 1,
        "execution": "shop/production/a1b2c3",
        "link": link,
    }


@pytest.mark.parametrize("status", [404, 500, 302])
def test_a_server_that_refuses_fails_nothing_and_the_url_is_not_shown(server, capsys, status):
    webhook.notify(f"{server.url}/{status}/{TOKEN}", {})
    said = capsys.readouterr().err
    assert f"the webhook was not notified of the failure: its server answered {status}" in said
    assert TOKEN not in said
    assert len(server.posted) == 1, "no redirect is followed"


def test_a_server_that_hangs_is_given_up(capsys, monkeypatch):
    monkeypatch.setattr(webhook, "POST_SECONDS", 0.5)
    with bad_server() as url:
        webhook.notify(url, {})
    said = capsys.readouterr().err
    assert "the webhook was not notified of the failure: " in said
    assert TOKEN not in said


@pytest.mark.parametrize("url", [f"http://127.0.0.1:1/{TOKEN}", f"ftp://host/{TOKEN}", f"http://a b/{TOKEN}\n", TOKEN])
def test_what_cannot_be_reached_is_said_without_the_url(capsys, url):
    webhook.notify(url, {})
    said = capsys.readouterr().err
    assert "the webhook was not notified of the failure: " in said
    assert TOKEN not in said


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (RankError(Failure(1, "host", "error", "LookupError", "no such word")), True),
        (attempt_error(platform, Failure(1, "host", "error", "LookupError", "no such word"), "place"), True),
        (PreemptedError("all ranks on host: SIGTERM: stopped"), False),
        (
            attempt_error(
                platform, to_failure(platform, PreemptedError("all ranks on host: SIGTERM: stopped")), "place"
            ),
            False,
        ),
        (KeyboardInterrupt(), False),
    ],
)
def test_who_was_told_to_stop_has_not_failed(server, monkeypatch, error, is_told):
    monkeypatch.setenv("DDP_WEBHOOK", f"{server.url}/200")
    with pytest.raises(type(error)), webhook.notifying_webhook(platform):
        raise error
    assert [(one["rank"], one["host"], one["cause"], one["message"]) for one in server.posted] == [
        (1, "host", "LookupError", "no such word")
    ] * is_told


def test_an_error_outside_of_the_ranks_names_this_host(server, monkeypatch):
    monkeypatch.setenv("DDP_WEBHOOK", f"{server.url}/200")
    with pytest.raises(ZeroDivisionError), webhook.notifying_webhook(platform):
        raise ZeroDivisionError("by zero\nand more")
    (posted,) = server.posted
    assert (posted["rank"], posted["host"], posted["cause"]) == (None, machine.node(), "ZeroDivisionError")
    assert posted["message"] == "by zero"


@pytest.mark.parametrize(
    "training",
    [
        lambda: image_training.run(Hyperparameters(), RunOptions(), FlyteDirectory("nowhere")),
        lambda: RecipeTraining("tabular.recipe:Tabular").run(TrainingSettings(), RunOptions()),
    ],
)
def test_a_pod_that_lacks_its_gpus_is_told(server, monkeypatch, training):
    monkeypatch.setenv("DDP_WEBHOOK", f"{server.url}/200")
    monkeypatch.setenv(GPUS_VARIABLE, "1024")
    monkeypatch.setattr(platform, "previous_checkpoint_url", lambda: "")
    monkeypatch.syspath_prepend(str(dry_run.ROOT / "examples"))
    with pytest.raises(TaskInterruptedError, match="as many GPUs as were registered"):
        training()
    (posted,) = server.posted
    assert (posted["rank"], posted["host"], posted["recoverable"]) == (None, machine.node(), True)
    assert posted["message"].startswith("this pod must have as many GPUs as were registered (1024)")


# --- registration ---


def test_training_pods_know_the_webhook_or_its_secret():
    open_one, secret = (
        made.tasks["workflows.mnist.pytorch_mnist_task"] for made in (full_package(), sandbox_package())
    )
    given = {variable.key: variable.value for variable in container_of(open_one).env}
    assert given["DDP_WEBHOOK"] == "https://hooks.example.org/1"
    assert given["DDP_CONSOLE"] == "https://flyte.example.org/console"
    found = {one.env_var: (one.group, one.key) for one in secret.security_context.secrets}
    assert found == {
        "DDP_POD_WEBHOOK": ("hooks", "url"),
        "WANDB_API_KEY": ("tracking", "key"),
        "MLFLOW_TRACKING_URI": ("tracking", "address"),
    }
    assert {one.mount_requirement for one in secret.security_context.secrets} == {Secret.MountType.ENV_VAR.value}
    assert "DDP_WEBHOOK" not in {variable.key for variable in container_of(secret).env}


@pytest.mark.parametrize(
    ("registered", "field", "names", "phases"),
    [(full_package, "slack", "ab", ["SUCCEEDED", "FAILED"]), (sandbox_package, "email", ["me"], DEFAULT_PHASES)],
)
def test_ready_made_launch_plans_notify(registered, field, names, phases):
    plans = registered().launch_plans
    for name in ("mnist", "fashion_mnist", "cifar10", "digits_smoke", "nightly"):
        (notified,) = plans[name].spec.entity_metadata.notifications
        assert list(getattr(notified, field).recipients_email) == [f"{name}@example.org" for name in names]
        assert [WorkflowExecution.Phase.Name(phase) for phase in notified.phases] == phases
    assert not package().launch_plans["nightly"].spec.entity_metadata.notifications


def test_a_dry_run_of_the_documented_registration_shows_who_is_told(capsys):
    page = (dry_run.ROOT / "docs" / "on-a-cluster.md").read_text()
    (variables,) = re.findall(r"^((?:DDP_\w+=\S+ )+)make dry-run IMAGE=\S+$", page, re.MULTILINE)
    assert dict(assignment.split("=", 1) for assignment in variables.split()).items() <= SANDBOX.items()
    dry_run.show_package(sandbox_package())
    said = capsys.readouterr().out
    assert said.count("email me@example.org: failed, timed_out, aborted") == 5
    assert "hooks/url as DDP_POD_WEBHOOK" in said
    assert "no limit" in said
    assert "3600 s" in said
    assert " 0 s" not in said
