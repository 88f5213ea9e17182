"""The commands that a cluster's pods run, one after the other, against a local run of the same workflow."""

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.tasks_pb2 import Resources
from google.protobuf.json_format import MessageToDict

from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.progress import attempts_in
from flyte_ddp.settings import RunOptions
from tests.commands import pyflyte
from tests.pod import (
    PATIENCE_SECONDS,
    Pod,
    container_of,
    is_whole,
    literal,
    package_for_here,
    small_dataset,
)
from tests.report.test_tracking import KEY, files_with
from tests.report.test_watch import watch
from tests.report.wandb_server import Server

HP = Hyperparameters(dataset="digits", epochs=1, batch_size=512)
SETTINGS: dict[str, Any] = {"epochs": 20, "batch_size": 50, "learning_rate": 0.02, "precision": "float32"}
SMALL = Hyperparameters(**SETTINGS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("pods")


@pytest.fixture(scope="module")
def prepared(place):
    """The outputs of the first two pods: the name of the dataset, and the prepared dataset."""
    tasks = package_for_here().tasks
    inputs = {"hp": literal(HP), "options": literal(RunOptions())}
    name = Pod(tasks["flyte_ddp.flyte1.prepare.resolve_dataset"], inputs, place / "resolve").run()["o0"]
    assert name.scalar.primitive.string_value == "digits"
    data = Pod(tasks["flyte_ddp.flyte1.prepare.prepare_dataset"], {"name": name}, place / "prepare").run()["o0"]
    assert data.scalar.blob.uri.startswith(str(place / "prepare" / "raw"))
    return data


@pytest.fixture(scope="module")
def small(place):
    return small_dataset(place / "small")


def training_pod(data, folder, options, hp=SMALL, **more):
    task = package_for_here().tasks["workflows.mnist.pytorch_mnist_task"]
    return Pod(task, {"hp": literal(hp), "data": data, "options": literal(options)}, folder, **more)


def accuracies(outputs):
    return [value.scalar.primitive.float_value for value in outputs["epoch_accuracies"].collection.literals]


@pytest.fixture(scope="module")
def undisturbed(place, small, whole):
    """The accuracies of a plain call, with as many ranks as a pod would have here."""
    trained = whole(0, data=place / "small", **SETTINGS)
    return [epoch.test["accuracy"] for epoch in trained.result.epochs]


@pytest.mark.slow
def test_pods_train_as_a_local_run_does_and_show_their_report_meanwhile(place, prepared):
    """With everything switched on."""
    hp = dataclasses.replace(SMALL, dataset="digits", epochs=2, train_fraction=0.1)
    options = RunOptions(tracking="online", profile=True)
    with Server("answers") as server:
        tracker = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        pod = training_pod(prepared, place / "train", options, hp=hp, environment=tracker)
        deck = pod.folder / "deck.html"
        with pod.running() as process:
            pod.wait_until(deck.exists, process)
            is_live = not pod.outputs_file.exists()
            process.wait(PATIENCE_SECONDS)
        outputs = pod.outputs()
    assert is_live
    uri = outputs["model_state"].scalar.blob.uri
    assert uri.startswith(str(pod.folder / "raw")), "Flyte's storage"
    assert os.path.getsize(uri) > 1_000_000
    known = read_metadata(uri)
    assert known is not None, "it can be loaded wherever it is copied"
    assert (known.settings["dataset"], known.measures["accuracy"]) == ("digits", accuracies(outputs)[-1])
    page = deck.read_text()
    assert page.count('role="img"') == 5
    assert "Finished" in page
    assert server.url in page
    assert 'role="img"' in Path(outputs["report"].scalar.blob.uri).read_text()
    assert outputs["logs"].scalar.blob.uri == str(pod.folder / "raw" / "logs"), "where the logs of a lost pod are too"
    names = {path.name for path in pod.logs.rglob("*")}
    assert {"predictions.npy", "rank0.pt.trace.json", "rank1.pt.trace.json", "operators.json"} <= names
    status, said = watch(pod.logs)
    assert status == 0
    assert "Epoch 2 of 2: test accuracy" in said, "from Flyte's storage"
    assert not files_with(KEY, pod.folder)

    local = pyflyte("workflows/mnist.py", "pytorch_training_wf", "--hp", hp.to_json())
    (shown,) = re.findall(r"epoch_accuracies=\[([^\]]*)\]", local.stdout)
    assert accuracies(outputs) == [float(value) for value in shown.split(", ")]


@pytest.mark.slow
def test_attempts_that_are_asked_to_stop_or_killed_lose_nothing_and_the_next_says_where_their_logs_are(
    place, small, undisturbed
):
    """Asked as Kubernetes does it: the main process, and again while what is left of it ends. Then killed."""
    hp = dataclasses.replace(SMALL, log_interval=1)
    first = training_pod(small, place / "asked", RunOptions(checkpoint_seconds=1e9), hp=hp)
    with first.running() as process:
        first.wait_until(lambda: "Train Epoch" in first.log, process)
        for _ in range(3):
            os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
    assert "SIGTERM: stopped on request before epoch" in first.error.error.message, first.log
    assert first.error.error.kind == ContainerError.RECOVERABLE, "worth a retry"
    assert is_whole(first.checkpoints / "checkpoint")

    options = RunOptions(checkpoint_seconds=0.4)  # within an epoch, and so rarely that the last one is whole
    second = training_pod(small, place / "killed", options, hp=hp, previous=first)
    names = "logs/console.log", "logs/progress.jsonl", "report.html"
    stored, progress, report = (place / "killed" / "raw" / name for name in names)
    written = (report.exists, stored.exists, lambda: any(one.seconds["steps"] for one in attempts_in(progress)[1:]))
    asked = (first.checkpoints / "checkpoint").read_bytes()

    def has_a_checkpoint():
        checkpoint = second.checkpoints / "checkpoint"
        return is_whole(checkpoint) and checkpoint.read_bytes() != asked  # it begins with that of the first

    second.kill_when(lambda: all(is_there() for is_there in written) and has_a_checkpoint())
    assert not second.outputs_file.exists()
    assert "resuming from the checkpoint" in second.log
    third = training_pod(small, place / "retried", options, hp=hp, previous=second)
    assert accuracies(third.run()) == undisturbed
    assert "resuming from the checkpoint" in third.log
    assert is_whole(third.checkpoints / "checkpoint"), "for the attempt after this one"
    assert f"; those of the previous attempt: {stored.parent}\n" in third.log
    _, before, now = attempts_in(place / "retried" / "raw" / "logs" / "progress.jsonl")
    assert before.seconds["steps"] + before.seconds["lost"] > 0
    assert now.seconds["between"] == pytest.approx(now.began - before.ended)


@pytest.mark.slow
def test_gpus_of_one_run_reach_its_training_pod(place):
    (place / "earlier").mkdir()
    node = {"node": "node-a", "reason": "ECC", "time": time.time(), "execution": "the-one-before", "url": ""}
    (place / "earlier" / "avoided-nodes.json").write_text(json.dumps({"format": 1, "nodes": [node]}))
    options = RunOptions(resume_from=f"{place}/earlier")
    inputs = {"gpus": literal(3), "hp": literal(HP), "options": literal(options)}
    registered = package_for_here()
    task, avoiding = registered.tasks["workflows.gpus.train_on_gpus"], {"DDP_AVOID_HOURS": "24"}
    pod = Pod(task, inputs, place / "gpus", environment=avoiding)
    assert pod.finish() == 0, pod.log
    job = DynamicJobSpec.FromString((pod.folder / "futures.pb").read_bytes())
    (training,) = (node for node in job.nodes if "pytorch_mnist_task" in node.task_node.reference_id.name)
    limits = {
        Resources.ResourceName.Name(entry.name): entry.value for entry in training.task_node.overrides.resources.limits
    }
    assert limits.items() >= {"GPU": "3", "MEMORY": "24Gi"}.items()
    (task,) = (task for task in job.tasks if task.id.name == "workflows.mnist.pytorch_mnist_task")
    as_registered = registered.tasks["workflows.mnist.pytorch_mnist_task"]
    assert container_of(task).image == container_of(as_registered).image
    for field in ("metadata", "interface", "security_context", "extended_resources"):
        assert getattr(task, field) == getattr(as_registered, field), field
    asked = {variable.key: variable.value for variable in container_of(task).env}["DDP_POD_GPUS"]
    assert asked == "3", "the pod counts them"
    affinity = MessageToDict(task.k8s_pod.pod_spec)["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-a"]}]
