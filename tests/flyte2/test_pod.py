"""The command of a Flyte 2 pod that trains, as the SDK writes it: killed, started again, retried, stopped."""

import errno
import os
import signal
import threading

import pytest
from flyte._internal.runtime.convert import convert_from_native_to_error
from flyte.io import Dir, File
from flyteidl2.core.execution_pb2 import ContainerError
from flyteidl2.task.common_pb2 import Inputs, Outputs

from flyte2 import mnist, promote
from flyte_ddp.data.prepared import prepared
from flyte_ddp.flyte2 import platform
from flyte_ddp.launch.failures import from_exception, from_exit_code
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.attempt.test_webhook import Server
from tests.commands import same
from tests.flyte2.pod import Pod2, weights
from tests.object_storage import object_storage
from tests.report import wandb_server as tracker

HP = Hyperparameters(epochs=4, batch_size=16, precision="float32")
NO_GPU = {"DDP_POD_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}  # so that this machine's do not matter
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
        values = {"hp": hp, "data": data, "options": options}
        return Pod2(mnist.train, values, storage, number, action, {**NO_GPU, **environment})

    return make


def tracker_runs(server):
    """Their names, each time that a client opens or changes one."""
    asked = zip(server.operations, server.variables, strict=False)  # both grow
    return [variables["name"] for operation, variables in asked if operation == "UpsertBucket"]


@pytest.fixture(scope="module")
def undisturbed(whole):
    """A plain call, with as many ranks as a pod has here."""
    return whole(0, epochs=4)


@pytest.mark.slow
def test_a_killed_pod_comes_back_as_the_same_attempt_in_one_tracker_run(storage, pod, undisturbed):
    """In test_flyte2_pod.py of scripts the next attempt goes on."""
    with tracker.Server("answers") as server:
        tracked = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        first, console = pod(**tracked), "bucket/run/train/1/logs/console.log"
        first.kill_when(lambda objects: CHECKPOINT in objects and console in objects and tracker_runs(server))
        runs = tracker_runs(server)
        again = pod(**tracked)
        assert again.command == first.command
        assert again.finish() == 0
    assert len({*runs}) == 1
    assert {*runs} == {*tracker_runs(server)[len(runs) :]}, "all pods are one run"
    outputs = again.outputs()
    assert "resuming from the checkpoint" in again.log
    assert same(weights(storage, outputs), undisturbed.weights)
    assert outputs.epoch_accuracies == [epoch.test["accuracy"] for epoch in undisturbed.result.epochs]
    assert "of the previous attempt: s3://bucket/run/train/1/logs\n" in again.log
    remains = storage.objects[console]
    assert b"Logs: s3://bucket/run/train/1/logs" in remains
    assert b"resuming" not in remains, "the log of the killed pod, not of the one after it"
    assert outputs.logs.path == "s3://bucket/run/train/1/restart-1/logs"
    assert "bucket/run/train/1/restart-1/logs/predictions.npy" in storage.objects
    assert b"accuracy" in storage.objects["bucket/run/train/1/report.html"], "Flyte's own page"


@pytest.mark.slow
def test_a_promotion_is_stored_and_its_report_is_a_tab(storage, data, undisturbed):
    storage.objects["bucket/model.pt"] = (undisturbed.folder / "model.pt").read_bytes()
    values = {"model_state": File(path="s3://bucket/model.pt"), "data": data, "hp": HP, "options": PromotionOptions()}
    pod = Pod2(
        promote.promote, {**values, "place": "s3://bucket/models"}, storage, action="promote", environment=NO_GPU
    )
    pod.finish()
    outputs = pod.outputs()
    version = f"bucket/models/versions/{outputs.summary.version}"
    assert same(weights(storage, outputs), undisturbed.weights)
    assert storage.objects[f"{version}/model.pt"] == storage.objects["bucket/model.pt"]
    page = storage.objects["bucket/run/promote/1/report.html"].decode()
    assert ">Promotion</li>" in page
    assert f"accuracy {outputs.summary.candidate:.2%}, as the first model" in page

    values = {"model_state": outputs.model_state, "summary": outputs.summary, "artifact": "mnist"}
    publication = Pod2(promote.publish, values, storage, action="publish")
    assert publication.finish() == 0, publication.log
    (published,) = Outputs.FromString(storage.objects["bucket/run/publish/1/outputs.pb"]).produced_artifacts
    assert (published.name, published.version) == ("mnist", outputs.summary.version)
    assert publication.outputs().path == outputs.model_state.path


def test_a_storage_that_fails_is_told_from_one_without_the_file(storage, tmp_path, monkeypatch):
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    storage.objects["bucket/there"] = b"x"
    with pytest.raises(FileNotFoundError):
        platform.get("s3://bucket/not-there", tmp_path / "file")
    monkeypatch.setattr(storage, "failures", 1000)
    with pytest.raises(Exception, match="not now") as error:
        platform.get("s3://bucket/there", tmp_path / "file")
    assert not isinstance(error.value, FileNotFoundError), "else training would begin anew"


def test_a_killed_rank_is_worth_a_retry_and_a_full_disk_is_not():
    killed = from_exit_code(-signal.SIGKILL, 1, "host")
    full = from_exception(OSError(errno.ENOSPC, "No space left on device"), 1, "host")
    errors = [convert_from_native_to_error(platform.error(failure, str(failure))) for failure in (killed, full)]
    assert [error.recoverable for error in errors] == [True, False]
    assert errors[0].err.message.startswith("rank 1 on host: SIGKILL: probably out of memory")


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
        assert diverging.finish() == 0, diverging.log  # Flyte reads the error from its file
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


@pytest.mark.slow
def test_a_wrong_input_from_the_console_is_final_and_one_line(storage, pod):
    wrong = pod("wrong")
    inputs = Inputs.FromString(storage.objects["bucket/run/wrong/inputs.pb"])
    (hp,) = (named.value.scalar for named in inputs.literals if named.name == "hp")
    hp.generic.update({"epochz": 1})
    storage.objects["bucket/run/wrong/inputs.pb"] = inputs.SerializeToString()
    wrong.finish()
    assert wrong.error.error.kind == ContainerError.NON_RECOVERABLE, wrong.log
    assert 'Hyperparameters has no field "epochz"' in wrong.error.error.message
    assert len(wrong.error.error.message.splitlines()) == 1


def test_a_pod_without_the_gpus_that_it_asked_for_is_tried_elsewhere(pod):
    missing = pod("missing", DDP_POD_GPUS="4")
    missing.finish()
    assert missing.error.error.kind == ContainerError.RECOVERABLE
    assert "as many GPUs as were registered (4), got 0 on " in missing.error.error.message
