"""The pods of tasks that no other test starts, small: like any pod of a test, against the memory that it may have.

Preparing real datasets takes more: see tests/data/test_datasets.py.
"""

from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.literals_pb2 import Literal
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile

from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.export.settings import ClassifierExport, FolderExport
from flyte_ddp.recipes.hyperparameters import (
    CIFAR10Hyperparameters,
    FolderHyperparameters,
)
from flyte_ddp.settings import RunOptions
from scripts.dry_run import amounts
from tests.commands import ROOT
from tests.once import trained_classifier
from tests.pod import TWO_NODES, Pod, container_of, literal, package, small_dataset

pytestmark = pytest.mark.slow

ONCE: dict[str, Any] = {"dataset": "digits", "epochs": 1, "train_fraction": 0.04}
OPTIONS = RunOptions()


def tasks():
    """As registered for a cluster without GPUs, whose pods are the smallest."""
    return package(**TWO_NODES).tasks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a task's pod and returns its outputs."""

    def run(name, /, **inputs):
        literals = {key: value if isinstance(value, Literal) else literal(value) for key, value in inputs.items()}
        return Pod(tasks()[name], literals, tmp_path_factory.mktemp("pods") / name).run()

    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="module")
def images(run):
    """The inputs of tasks that read image files."""
    found = run("flyte_ddp.flyte1.index_images.find_images", folder="")
    assert found["folder"].hash, "by which a pod knows the digits again, each of which has them in a place of its own"
    index = run("flyte_ddp.flyte1.index_images.index_images", images=ImageSettings(), **found)["o0"]
    return {"index": index, "folder": found["folder"]}


def test_training_and_export(run, digits):
    run("workflows.cifar10.cifar10_task", hp=CIFAR10Hyperparameters(**ONCE), data=digits, options=OPTIONS)
    exported = run(
        "flyte_ddp.export.task.export_classifier",
        model_state=PythonPickledFile(str(trained_classifier(train_fraction=0.5).model), remote_path=False),
        data=FlyteDirectory(str(prepare("digits")), remote_directory=False),
        options=ClassifierExport(dataset="digits"),
    )
    model = Path(exported["model"].scalar.blob.uri)
    assert {"model.safetensors", "model.pt2", "model.onnx", "model_card.md"} <= {file.name for file in model.iterdir()}


def test_image_files(run, images):
    hp = FolderHyperparameters(epochs=1, train_fraction=0.1)
    trained = run("workflows.image_folder.image_folder_task", hp=hp, options=OPTIONS, **images)
    given = {"model_state": trained["model_state"], "options": FolderExport(), **images}
    run("flyte_ddp.export.task.export_folder_classifier", **given)


def test_every_task_that_computes_has_a_pod_in_some_test():
    """The others only pass values on. A map task's items are the task that it maps; Fashion-MNIST's task is MNIST's."""
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    with_pods = "".join(text for text in texts if "Pod(" in text or "meeting(" in text)  # of tests/nodes.py
    computing = [name for name, task in tasks().items() if "400Mi" not in amounts(container_of(task).resources.limits)]
    assert len(computing) > 15
    computing = [name for name in computing if ".map_" not in name and not name.startswith("workflows.fashion_mnist.")]
    assert [name for name in computing if name.rpartition(".")[2] not in with_pods] == []
