"""The command of a Flyte 2 pod that trains, as the SDK writes it: killed, started again, retried, stopped."""

import io
import os
import signal
import threading

import pytest
import torch
from flyte.io import Dir
from flyteidl2.core.execution_pb2 import ContainerError

from flyte2 import mnist
from flyte_ddp.data import prepared
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.attempt.test_webhook import Server
from tests.commands import same
from tests.flyte2.pod import Pod2
from tests.object_storage import object_storage

HP = Hyperparameters(epochs=4, batch_size=16, precision="float32")
OFTEN = RunOptions(checkpoint_seconds=0.2)
CHECKPOINT = "bucket/run/train/1/_flytecheckpoints/checkpoint"


@pytest.fixture(scope="module")
def storage():
    """For all pods: each action has a folder of its own."""
    with object_storage() as server:
        yield server


@pytest.fixture(scope="module")
def data(storage, small_data):
    for file in small_data.iterdir():
        storage.objects[f"bucket/small/{file.name}"] = file.read_bytes()
    return Dir(path="s3://bucket/small", hash=prepared.read_description(small_data).digest)


@pytest.fixture(scope="module")
def pod(storage, data):
    def make(action="train", number=1, hp=HP, options=OFTEN, **environment):
        # no GPU is asked for, so that this machine's do not matter
        environment = {"DDP_POD_GPUS": "0", "CUDA_VISIBLE_DEVICES": "", **environment}
        values = {"hp": hp, "data": data, "options": options}
        return Pod2(mnist.train, values, storage, number, action, environment)

    return make


def weights(storage, outputs):
    content = storage.objects[outputs.model_state.path.removeprefix("s3://")]
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.fixture(scope="module")
def whole(pod):
    undisturbed = pod("whole")
    assert undisturbed.finish() == 0, undisturbed.log
    return undisturbed.outputs()


@pytest.mark.slow
def test_a_killed_pod_comes_back_as_the_same_attempt_and_goes_on_where_it_was(storage, pod, whole):
    first = pod()
    first.kill_when(lambda objects: CHECKPOINT in objects and "bucket/run/train/1/logs/console.log" in objects)
    again = pod()
    assert again.command == first.command
    assert again.finish() == 0
    outputs = again.outputs()
    assert "resuming from the checkpoint" in again.log
    assert same(weights(storage, outputs), weights(storage, whole))
    assert outputs.epoch_accuracies == whole.epoch_accuracies
    assert "of the previous attempt: s3://bucket/run/train/1/logs\n" in again.log
    remains = storage.objects["bucket/run/train/1/logs/console.log"]
    assert b"Logs: s3://bucket/run/train/1/logs" in remains
    assert b"resuming" not in remains, "the log of the killed pod, not of the one after it"
    assert outputs.logs.path == "s3://bucket/run/train/1/restart-1/logs"
    assert "bucket/run/train/1/restart-1/logs/predictions.npy" in storage.objects
    assert b"accuracy" in storage.objects["bucket/run/train/1/report.html"], "Flyte's own page"


@pytest.mark.slow
def test_the_attempt_after_a_failure_goes_on_from_the_previous_ones_checkpoint(storage, pod, whole):
    first = pod("retried")
    first.kill_when(lambda objects: CHECKPOINT.replace("train", "retried") in objects)
    second = pod("retried", 2)
    assert second.finish() == 0
    assert "resuming from the checkpoint" in second.log
    assert same(weights(storage, second.outputs()), weights(storage, whole))
    assert "bucket/run/retried/2/_flytecheckpoints/checkpoint" in storage.objects, "for the attempt after this one"


@pytest.mark.slow
def test_a_pod_that_is_asked_to_stop_writes_a_checkpoint_first(storage, pod):
    stopped = pod("stopped", options=RunOptions(checkpoint_seconds=1e9), hp=Hyperparameters(epochs=10**6))
    checkpoint = CHECKPOINT.replace("train", "stopped")
    with stopped.running() as process:
        while "Epoch 1 of" not in stopped.log:
            assert process.poll() is None, stopped.log
        before = storage.objects.get(checkpoint)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    assert storage.objects[checkpoint] != before
    assert stopped.error.error.kind == ContainerError.RECOVERABLE
    assert "SIGTERM" in stopped.error.error.message


@pytest.mark.slow
def test_what_only_a_person_can_mend_is_final_and_told_with_the_place_of_the_logs(pod):
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        addresses = {"DDP_WEBHOOK": f"{server.url}/200", "DDP_CONSOLE": "https://flyte.example.org/"}
        diverging = pod("diverging", hp=Hyperparameters(learning_rate=1e30, epochs=1), **addresses)
        assert diverging.finish() == 0, "Flyte reads the error from its file"
    error = diverging.error.error
    assert error.kind == ContainerError.NON_RECOVERABLE
    first, second, *_ = error.message.splitlines()
    assert "NonFiniteError: loss is not finite in epoch 1" in first
    assert second == "Logs: s3://bucket/run/diverging/1/logs"
    assert error.code == "NonFiniteError"
    (posted,) = server.posted
    assert (posted["cause"], posted["recoverable"], posted["attempt"]) == ("NonFiniteError", False, 0)
    assert posted["execution"] == "flytesnacks/development/run"
    assert posted["link"] == "https://flyte.example.org/v2/domain/development/project/flytesnacks/runs/run"


def test_a_pod_without_the_gpus_that_it_asked_for_is_tried_elsewhere(pod):
    missing = pod("missing", DDP_POD_GPUS="4")
    missing.finish()
    assert missing.error.error.kind == ContainerError.RECOVERABLE
    assert "as many GPUs as were registered (4), got 0 on " in missing.error.error.message
