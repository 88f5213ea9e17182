"""The network under both strategies, by real processes."""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import click
import pytest
from flyteidl.admin.task_pb2 import TaskSpec

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, EpochFinished, Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.failures import RecoverableRankError
from mirrored.processes import train
from mirrored.settings import Hyperparameters

PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def one_import() -> None:
    """TensorFlow is imported once for all processes that these tests start."""
    launcher.warm_up(["tensorflow"])


@pytest.fixture
def learn(tmp_path):
    number = itertools.count()

    def learn(listen=lambda event: None, checkpoint="", **hp):
        checkpoint = checkpoint or f"checkpoint-{next(number)}"
        return train(Hyperparameters(**hp), tmp_path / "model.keras", tmp_path / checkpoint, listen)

    return learn


def pyflyte(*arguments: str, **environment: str) -> str:
    command = ["pyflyte", *arguments]
    done = subprocess.run(command, cwd=PROJECT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_two_workers_learn_behind_a_proxy_and_leave_a_network_that_keras_reads(tmp_path):
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # refuses, and must not be asked
    run = ["run", "mirrored/workflow.py", "mirrored_wf", "--hp", '{"strategy": "multi_worker"}']
    said = pyflyte(*run, DDP_RUNS_DIR=str(tmp_path), **proxy)
    (accuracy,) = re.findall(r"Epoch 30 of 30: test accuracy ([\d.]+)%", said)
    assert float(accuracy) >= 95
    (folder,) = tmp_path.glob("*-mirrored-*")
    page = (folder / "report.html").read_text()
    assert f"{float(accuracy):.1f}% of the test samples correct" in page
    assert "2 replicas, CPU:0 in each of 2 processes" in page

    program = """if True:
        import sys, keras
        from mirrored.data import breast_cancer
        from mirrored.training import evaluate
        print(evaluate(keras.models.load_model(sys.argv[1]), breast_cancer("test"))["accuracy"])
    """
    command = [sys.executable, "-c", program, str(folder / "model.keras")]
    read = subprocess.run(command, capture_output=True, text=True)
    assert f"{float(read.stdout):.2%}" == f"{accuracy}%", read.stderr


def test_what_is_registered_has_the_image_and_all_code_and_needs_no_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('is not needed here')")
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    package = ["package", "--copy", "auto", "--image", "trainer=registry.example/mirrored:2"]
    pyflyte("--pkgs", "mirrored.workflow", *package, "--output", str(tmp_path / "made.tgz"), PYTHONPATH=path)
    files = content(tmp_path / "made.tgz")
    (task,) = (TaskSpec.FromString(files[name]).template for name in files if name.endswith("train_mirrored_1.pb"))
    assert (task.container.image, task.metadata.retries.retries) == ("registry.example/mirrored:2", 2)
    (archive,) = (name for name in files if name.endswith(".tar.gz"))
    (tmp_path / "code.tgz").write_bytes(files[archive])
    assert {f"mirrored/{file.name}" for file in (PROJECT / "mirrored").glob("*.py")} <= set(
        content(tmp_path / "code.tgz")
    )


def content(archive: Path) -> "dict[str, bytes]":
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def test_devices_are_not_for_workers():
    with pytest.raises(InputError, match=r'devices must be empty .* got "CPU:0"'):
        Hyperparameters(strategy="multi_worker", devices="CPU:0")


def test_the_number_of_devices_and_workers_does_not_change_what_is_learnt(learn):
    # without dropout, whose masks are drawn per replica; 32 samples make parts of 11, 11 and 10
    one = learn(epochs=3, dropout=0.0, devices="CPU:0")
    three = learn(epochs=3, dropout=0.0, logical_devices=3)
    assert (one.devices, three.devices) == (["CPU:0"], ["CPU:0", "CPU:1", "CPU:2"])
    for epoch, same in zip(three.epochs, one.epochs, strict=True):
        assert epoch.train["loss"] == pytest.approx(same.train["loss"], rel=1e-4)
        assert epoch.test["loss"] == pytest.approx(same.test["loss"], rel=1e-4)

    devices, workers = learn(epochs=3), learn(epochs=3, strategy="multi_worker")
    assert devices.replicas == workers.replicas == 2
    assert [e.train for e in devices.epochs] == [e.train for e in workers.epochs], "not bit for bit"


@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_a_training_goes_on_from_its_checkpoint_to_the_same_end(learn, strategy):
    def fail_after_two(event: Event) -> None:
        if isinstance(event, CheckpointWritten) and event.epoch == 2:
            raise ConnectionError

    def losses(result):
        return [(epoch.train["loss"], epoch.test["loss"]) for epoch in result.epochs]

    hp, said = {"epochs": 4, "strategy": strategy}, []
    with pytest.raises(ConnectionError):
        learn(fail_after_two, "checkpoint", **hp)
    assert losses(learn(said.append, "checkpoint", **hp)) == losses(learn(**hp)), "bit for bit"
    assert [event.epoch for event in said if isinstance(event, EpochFinished)] == [2, 3]


@pytest.mark.parametrize(
    ("hp", "said"),
    [
        ({"devices": "CPU:0,GPU:7"}, 'devices must exist, got "GPU:7" where there are CPU:0, CPU:1'),
        ({"batch_size": 1}, "number of replicas .2. .* got 1"),
        ({"batch_size": 457}, "training samples .456., got 457"),
        ({"learning_rate": 1e30}, "not finite in epoch 1: lower learning_rate"),
    ],
)
def test_what_only_the_processes_find_out_is_said_in_one_line(learn, hp, said):
    with pytest.raises(click.ClickException, match=said):
        learn(**hp)


def test_a_killed_worker_is_named_and_worth_a_retry(learn):
    def kill_one(event: Event) -> None:
        multiprocessing.active_children()[0].kill()

    with pytest.raises(RecoverableRankError, match="SIGKILL"):
        learn(kill_one, strategy="multi_worker", epochs=10**6)
    assert multiprocessing.active_children() == []
