"""Each task's pod command, small, against the memory that its pod may have: a cluster kills what takes more.

Preparing real datasets takes more: see tests/data/test_datasets.py.
"""

import re
import socket
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
from flyteidl.core.literals_pb2 import Literal, LiteralCollection
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.autoencoder.job import AutoencoderHyperparameters, AutoencoderOptions
from flyte_ddp.data.image_settings import ImageSettings
from flyte_ddp.export.settings import ClassifierExport, FolderExport
from flyte_ddp.inference.shards import InferenceOptions
from flyte_ddp.loading.times import LoadingSettings
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.recipes.hyperparameters import (
    CIFAR10Hyperparameters,
    FashionMNISTHyperparameters,
    FolderHyperparameters,
    Hyperparameters,
)
from flyte_ddp.settings import RunOptions
from flyte_ddp.sweep.search import Sweep, TrialResult
from flyte_ddp.timing.measurement import TimingOptions
from tests.pod import Pod, literal, package, run_within_limits

SETTINGS = {"DDP_PROFILE": "sandbox", "DDP_JOIN_MINUTES": "5"}
ONCE: Dict[str, Any] = {"dataset": "digits", "epochs": 1, "train_fraction": 0.04}
HP, OPTIONS = Hyperparameters(**ONCE), RunOptions()


def tasks():
    """As registered for a cluster without GPUs, whose pods are the smallest."""
    return {
        name.removeprefix("workflows.").removeprefix("flyte_ddp."): task
        for name, task in package(**SETTINGS).tasks.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a task's pod, checks what memory it took and returns its outputs."""

    def run(name, /, environment=None, **inputs):
        literals = {key: value if isinstance(value, Literal) else literal(value) for key, value in inputs.items()}
        return run_within_limits(
            Pod(tasks()[name], literals, tmp_path_factory.mktemp("pods") / name, environment=environment)
        )

    return run


@pytest.fixture(scope="module")
def digits(run):
    name = run("tasks.prepare.resolve_dataset", hp=HP, options=OPTIONS)["o0"]
    return run("tasks.prepare.prepare_dataset", name=name)["o0"]


@pytest.fixture(scope="module")
def trained(run, digits):
    return run("mnist.pytorch_mnist_task", hp=HP, data=digits, options=OPTIONS)


def test_other_trainings(run, digits):
    fashion, cifar10 = FashionMNISTHyperparameters(**ONCE), CIFAR10Hyperparameters(**ONCE)
    run("fashion_mnist.fashion_mnist_task", hp=fashion, data=digits, options=OPTIONS)
    run("cifar10.cifar10_task", hp=cifar10, data=digits, options=OPTIONS)
    run("gpus.train_on_gpus", gpus=0, hp=HP, options=OPTIONS)
    run("hardware.inspect_hardware", hp=HP, options=OPTIONS)


def test_beginning_with_given_weights(run, digits, trained):
    place = trained["model_state"].scalar.blob.uri
    given = literal(FlyteFile(place, remote_path=False), Optional[FlyteFile])
    init = run("tasks.init.known_init", init=given)["o0"]
    assert init.hash == sha256(Path(place).read_bytes()).hexdigest()
    run("mnist.pytorch_mnist_task", hp=HP, data=digits, options=OPTIONS, init=init)


def test_many_nodes(run, digits, tmp_path):
    pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")
    run("tasks.nodes.resolve_for_nodes", hp=HP)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {"PET_RDZV_ENDPOINT": endpoint, "PET_NNODES": "2:2", "FLYTE_INTERNAL_EXECUTION_ID": "a"}
    inputs = {"hp": literal(HP), "data": digits, "options": literal(OPTIONS)}
    run_within_limits(
        *(
            Pod(tasks()["multinode.pytorch_multinode_task"], inputs, tmp_path / name, environment=variables)
            for name in "ab"
        )
    )


def test_autoencoder(run, digits):
    hp = AutoencoderHyperparameters(dataset="digits", epochs=1, limit_train_batches=0.1)
    options = AutoencoderOptions()
    run("autoencoder.task.resolve_for_autoencoder", hp=hp, options=options)
    run("autoencoder.train_on_gpus", gpus=0, hp=hp, options=options)
    run("autoencoder.autoencoder_task", hp=hp, data=digits, options=options)


@pytest.fixture(scope="module")
def images(run):
    """The inputs of tasks that read image files."""
    found = run("tasks.image_folder.find_images", folder="", images=ImageSettings())
    folder, stamp = found["folder"], found["stamp"]
    index = run("tasks.image_folder.index_images", folder=folder, stamp=stamp, images=ImageSettings())["o0"]
    return {"index": index, "folder": folder}


@pytest.fixture(scope="module")
def trained_on_images(run, images):
    hp = FolderHyperparameters(epochs=1, train_fraction=0.1)
    return run("image_folder.image_folder_task", hp=hp, options=OPTIONS, **images)


def test_image_folder(run, images):
    study = LoadingSettings(passes=2, most_images=256, most_workers=2)
    run("image_folder.loading_study_task", study=study, **images)


def test_inference(run, digits, trained):
    nothing, options = literal(None, Optional[FlyteDirectory]), InferenceOptions("mnist_cnn", "digits", shards=1)
    no_model = literal(None, Optional[PythonPickledFile])
    run("inference.task.check_inputs", model_state=no_model, folder=nothing, options=options)
    run("inference.given_or_trained", model_state=no_model, data=digits, options=options)
    given = {"model_state": trained["model_state"], "data": digits, "folder": nothing, "options": options}
    (shard,) = run("inference.task.plan_shards", **given)["o0"].collection.literals
    part = run("inference.task.predict_shard", shard=shard, **given)["o0"]
    parts = Literal(collection=LiteralCollection(literals=[part]))
    run("inference.gather.gather_shards", parts=parts, data=digits, folder=nothing, options=options)


def test_export(run, digits, trained):
    no_model, options = literal(None, Optional[PythonPickledFile]), ClassifierExport(dataset="digits")
    run("export.task.check_export", model_state=no_model, options=options)
    run("export.model_to_export", model_state=no_model, data=digits, options=options)
    given = {"model_state": trained["model_state"], "data": digits, "accuracies": trained["epoch_accuracies"]}
    outputs = run("export.task.export_classifier", options=options, **given)
    model = Path(outputs["model"].scalar.blob.uri)
    assert {"model.safetensors", "model.pt2", "model.onnx", "model_card.md"} <= {file.name for file in model.iterdir()}


def test_export_of_a_folder(run, images, trained_on_images):
    no_model, options = literal(None, Optional[PythonPickledFile]), FolderExport()
    run("export.task.check_folder_export", model_state=no_model, images=ImageSettings(), options=options)
    as_given = {"index": images["index"], "folder": "", "images": ImageSettings()}
    run("export.folder_model_to_export", model_state=no_model, options=options, **as_given)
    given = {"model_state": trained_on_images["model_state"], "accuracies": trained_on_images["epoch_accuracies"]}
    run("export.task.export_folder_classifier", options=options, **given, **images)


def test_timing(run, digits):
    options = TimingOptions(dataset="digits", device_batch_sizes="8", repeats=1, seconds=0.05)
    run("timing.task.check_timing", options=options)
    run("timing.task.time_inference", data=digits, options=options)


def test_promote(run, digits, tmp_path):
    place, no_model = str(tmp_path / "models"), literal(None, Optional[PythonPickledFile])
    run("promote.task.check_promotion", place=place, model_state=no_model, hp=HP, options=OPTIONS)
    given = {"model_state": no_model, "hp": HP, "name": "digits", "options": OPTIONS}
    run("promote.candidate", **given)
    model = run("mnist.pytorch_mnist_task", hp=HP, data=digits, options=OPTIONS)["model_state"]
    given = {"model_state": model, "data": digits, "hp": HP, "place": place, "options": PromotionOptions()}
    run("promote.task.promote_images", **given)
    run("promote.task.roll_back", place=place, name="")


def test_sweep(run, digits):
    sweep = Sweep(values={"learning_rate": [0.03, 0.1]})
    trials = run("sweep.list_trials", sweep=sweep, hp=HP, options=OPTIONS)["o0"]
    held_out = run("sweep.held_out.hold_out_validation", data=digits)["o0"]
    run("sweep.run_trials", sweep=sweep, trials=trials, name="digits", options=OPTIONS)
    run("sweep.train_trial", hp=HP, held_out=held_out, options=OPTIONS)
    results = [TrialResult(HP, 0.9, 296), TrialResult(HP, 0.8, 296)]
    rungs = literal([results], List[List[Optional[TrialResult]]])
    run("sweep.compare", sweep=sweep, trials=trials, name="digits", rungs=rungs)
    halving, cut = replace(sweep, reduction_factor=2), literal([replace(HP, epochs=2)] * 2, List[Hyperparameters])
    run("sweep.next_rung", sweep=halving, trials=cut, rungs=rungs)


def test_no_task_is_left_out():
    """A map task's items are the task that it maps."""
    named = set(re.findall(r"(?:run\(|tasks\(\)\[)\"([\w.]+)\"", Path(__file__).read_text()))
    assert named == {name for name in tasks() if ".map_" not in name}
