"""The Keras network under tf.distribute, by real processes; and what is said where there is no TensorFlow."""

import multiprocessing
import socket
import subprocess
import sys
from importlib.util import find_spec
from typing import Iterator, List

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointRefused, CheckpointWritten, EpochFinished, Event
from flyte_ddp.keras.job import MirroredHyperparameters, MirroredJob
from flyte_ddp.keras.ports import free_ports
from flyte_ddp.keras.task import WORKER, train
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import RecoverableRankFailed
from tests.commands import ROOT, output, pyflyte_process, words
from tests.pod import Pod, literal, package

WORKFLOW = [str(ROOT / "workflows" / "keras_mirrored.py"), "keras_mirrored_wf"]

needs_tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow: make test-keras")


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "-1")
        yield


@pytest.fixture(scope="module")
def one_import() -> None:
    """TensorFlow is imported once for all processes that the tests with this fixture start."""
    launcher.warm_up(["tensorflow"])


# --- with TensorFlow or without ---


@pytest.mark.slow
def test_without_tensorflow_it_says_in_one_line_what_to_install(tmp_path):
    """Where it is installed, an interpreter that cannot find it runs the same workflow."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'tensorflow' else find(name, package)\n"
    )
    run = pyflyte_process(
        *WORKFLOW, "--hp", '{"devices": "GPU:7"}', status=1, environment={"PYTHONPATH": str(tmp_path)}
    )
    assert words(run.stderr).endswith('TensorFlow is missing: make keras, or pip install -e ".[tensorflow]"')


@pytest.mark.parametrize(
    ("hp", "said"),
    [
        ('{"epoch": 3}', ["epoch", "did you mean epochs?"]),
        ('{"strategy": "horovod"}', ["mirrored, multi_worker", "horovod"]),
        ('{"strategy": "multi_worker", "devices": "CPU:0"}', ["devices must be empty", "CPU:0"]),
        ('{"devices": "CPU:0,cpu:0"}', ["once each"]),
    ],
)
def test_wrong_input_is_a_usage_error(hp, said):
    with pytest.raises(InputError) as raised:
        MirroredHyperparameters.from_json(hp)
    assert all(word in str(raised.value) for word in said), raised.value


def test_a_free_port_is_kept_for_us_and_can_be_listened_on():
    with free_ports(2) as ports:
        assert len(set(ports)) == 2
        with socket.socket() as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            mine.bind(("127.0.0.1", ports[0]))
            mine.listen()


# --- with TensorFlow ---


@needs_tensorflow
def test_two_workers_learn_behind_a_proxy_and_leave_a_network_that_keras_reads(tmp_path):
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # refuses, and must not be asked
    run = pyflyte_process(
        *WORKFLOW, "--hp", '{"strategy": "multi_worker"}', environment={"DDP_RUNS_DIR": str(tmp_path), **proxy}
    )
    accuracy = float(output(run, "accuracy"))
    assert accuracy >= 0.95
    assert "devices='CPU:0', replicas=2" in run.stdout
    assert "Epoch 30 of 30: test accuracy" in run.stderr
    assert "absl" not in run.stderr, "TensorFlow's native code has spoken"
    (folder,) = tmp_path.glob("*-keras-*")
    assert f"{accuracy:.1%} of the test samples correct" in (folder / "report.html").read_text()

    program = """if True:
        import sys, keras
        from flyte_ddp.keras.rank import breast_cancer, evaluate
        print(evaluate(keras.models.load_model(sys.argv[1]), breast_cancer())[1])
    """
    command = [sys.executable, "-c", program, str(folder / "model.keras")]
    read = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert float(read.stdout) == accuracy, read.stderr


@needs_tensorflow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_its_pod_has_room_for_it(tmp_path, strategy):
    registered = package("--image", "keras=registry.example/keras:2", DDP_PROFILE="sandbox").tasks
    hp = MirroredHyperparameters(epochs=1, strategy=strategy)
    task = registered["workflows.keras_mirrored.keras_mirrored_task"]
    Pod(task, {"hp": literal(hp)}, tmp_path / "pod").run()


@needs_tensorflow
def test_a_device_that_is_not_there_is_a_usage_error_that_lists_those_that_are(tmp_path):
    run = pyflyte_process(
        *WORKFLOW, "--hp", '{"devices": "CPU:0,GPU:7"}', status=2, environment={"DDP_RUNS_DIR": str(tmp_path)}
    )
    assert 'there is no "GPU:7" here, but CPU:0, CPU:1' in words(run.stderr)
    assert list(tmp_path.glob("*-keras-*")) == []


@needs_tensorflow
def test_the_number_of_devices_and_workers_does_not_change_what_is_learnt(one_import, tmp_path):
    def learn(**hp):
        return train(MirroredHyperparameters(epochs=3, **hp), tmp_path / "model.keras")

    # without dropout, whose masks are drawn per replica; 32 samples make parts of 11, 11 and 10
    one = learn(dropout=0.0, devices="CPU:0")
    three = learn(dropout=0.0, logical_devices=3)
    assert (one.devices, three.devices) == (["CPU:0"], ["CPU:0", "CPU:1", "CPU:2"])
    for epoch, same in zip(three.epochs, one.epochs, strict=True):
        assert epoch.train["loss"] == pytest.approx(same.train["loss"], rel=1e-4)
        assert epoch.test["loss"] == pytest.approx(same.test["loss"], rel=1e-4)

    devices, workers = learn(), learn(strategy="multi_worker")
    assert devices.replicas == workers.replicas == 2
    assert [e.train for e in devices.epochs] == [e.train for e in workers.epochs], "not bit for bit"


@needs_tensorflow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_a_training_goes_on_from_its_checkpoint_to_the_same_end(one_import, tmp_path, strategy):
    hp = MirroredHyperparameters(epochs=4, strategy=strategy)
    said: List[Event] = []

    def learn(*listeners, **place):
        return train(hp, tmp_path / "model.keras", *listeners, **place).epochs

    def fail_after_two(event):
        if isinstance(event, CheckpointWritten) and event.epoch == 2:
            raise ConnectionError

    def losses(epochs):
        return [(epoch.train["loss"], epoch.test["loss"]) for epoch in epochs]

    place = {"checkpoint_path": str(tmp_path / "checkpoint"), "key": "mine"}
    with pytest.raises(ConnectionError):
        learn(fail_after_two, **place)
    assert losses(learn(said.append, **place)) == losses(learn()), "bit for bit"
    assert [event.epoch for event in said if isinstance(event, EpochFinished)] == [2, 3]

    (tmp_path / "checkpoint").write_bytes(b"no checkpoint at all, but longer than its checksum would be")
    said.clear()
    learn(said.append, **place)
    (refused,) = (event.reason for event in said if isinstance(event, CheckpointRefused))
    assert refused.startswith("the checkpoint is damaged")
    assert len([event for event in said if isinstance(event, EpochFinished)]) == 4


@needs_tensorflow
@pytest.mark.parametrize(
    ("hp", "said"),
    [
        ({"batch_size": 1}, "number of replicas .2. .* got 1"),
        ({"batch_size": 457}, "training samples .456., got 457"),
        ({"learning_rate": 1e30}, "not finite in epoch 1: lower learning_rate"),
    ],
)
def test_what_only_the_processes_find_out_is_an_input_error_too(one_import, tmp_path, hp, said):
    with pytest.raises(InputError, match=said):
        train(MirroredHyperparameters(**hp), tmp_path / "model.keras")


@needs_tensorflow
def test_a_killed_worker_is_named_and_worth_a_retry(one_import, tmp_path):
    def kill_one(event):
        multiprocessing.active_children()[0].kill()

    world, hp = World(2, 2, backend="", device=""), MirroredHyperparameters(strategy="multi_worker", epochs=10**6)
    with free_ports(2) as ports:
        job = MirroredJob(hp, str(tmp_path / "model.keras"), "", "", ports)
        with pytest.raises(RecoverableRankFailed, match="SIGKILL"):
            launcher.launch(WORKER, world, job, 300, kill_one)
    assert multiprocessing.active_children() == []
