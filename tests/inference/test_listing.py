"""A folder of images that changes between the plan of the shards, whose keys are of its files, and the predictions."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile
from PIL import Image

from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.export.settings import ClassifierExport
from flyte_ddp.export.task import check_export
from flyte_ddp.flyte1.index_images import find_images, index_images
from flyte_ddp.inference.gather import gather_shards
from flyte_ddp.inference.shards import InferenceOptions, read_rows
from flyte_ddp.inference.task import part_path, plan_shards, predict_shard, resolve_inputs
from tests.once import trained_classifier

OPTIONS = InferenceOptions(shards=1, model="mnist_cnn", dataset="digits")


@pytest.fixture(scope="module")
def trained():
    return trained_classifier(train_fraction=0.05)


@pytest.fixture
def local_execution():
    """As within a task that pyflyte runs here."""
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(
        mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION, working_dir=os.environ["DDP_RUNS_DIR"]
    )
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield


@pytest.fixture
def photos(tmp_path):
    """Two real digits of each of two classes."""
    images, _ = prepared.open_split(prepare("digits"), "test")
    for number in range(4):
        file = tmp_path / "photos" / str(number % 2) / f"b{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number, 0]).save(file)
    return tmp_path / "photos"


def folder_of(path):
    return FlyteDirectory(str(path), remote_directory=False)


def test_files_that_change_after_the_plan_are_in_no_cached_shard(trained, local_execution, photos):
    """One more image, before the others in their order, and one that is written to again."""
    model = PythonPickledFile(str(trained.model), remote_path=False)
    inputs = {"data": folder_of(prepare("digits")), "folder": folder_of(photos), "options": OPTIONS}
    plan = plan_shards.task_function(model_state=model, **inputs)
    inputs["listing"] = plan.listing
    (shard,) = plan.shards

    shutil.copy(photos / "0" / "b0.png", photos / "0" / "a.png")
    part = predict_shard.task_function(shard=shard, model_state=model, **inputs)
    assert [row.image for row in read_rows(Path(part.path))] == ["0/b0.png", "0/b2.png", "1/b1.png", "1/b3.png"]
    report = Path(gather_shards.task_function(parts=[part], **inputs).report.path).read_text()
    assert all(name in report for name in ("0/b0.png", "0/b2.png", "1/b1.png", "1/b3.png"))
    assert "a.png" not in report

    (photos / "1" / "b3.png").unlink()
    with pytest.raises(ReportedError, match=r"1 image files have changed while they were predicted, such as 1/b3.png"):
        gather_shards.task_function(parts=[part], **inputs)

    part_path(shard).unlink()
    (photos / "1" / "b1.png").write_bytes((photos / "0" / "b0.png").read_bytes() + b" ")
    with pytest.raises(ReportedError, match=r"2 image files have changed while they were predicted, such as 1/b1.png"):
        predict_shard.task_function(shard=shard, model_state=model, **inputs)
    assert not part_path(shard).exists()


def test_a_folder_that_is_emptied_before_the_plan_is_refused(trained, local_execution, photos):
    """It had been a plan for the split instead, whose predictions passed for the folder's."""
    shutil.rmtree(photos)
    photos.mkdir()
    model = PythonPickledFile(str(trained.model), remote_path=False)
    with pytest.raises(InputError, match=r"folder must contain image files, got .*photos without any: choose another"):
        plan_shards.task_function(
            model_state=model, data=folder_of(prepare("digits")), folder=folder_of(photos), options=OPTIONS
        )


@pytest.mark.parametrize(
    ("check", "inputs"),
    [
        (resolve_inputs, {"folder": None, "options": InferenceOptions(dataset="mnist")}),
        (check_export, {"options": ClassifierExport(dataset="mnist")}),
    ],
)
def test_another_dataset_than_the_weights_were_trained_on_is_refused(trained, local_execution, check, inputs):
    model = PythonPickledFile(str(trained.model), remote_path=False)
    with pytest.raises(InputError, match=r"dataset must be .* model_state was trained on, digits, got mnist: leave it"):
        check.task_function(model_state=model, **inputs)


def test_an_index_of_images_that_have_changed_since_their_key_was_made_is_not_kept(local_execution, photos):
    found = find_images.task_function(folder=str(photos))
    shutil.copy(photos / "0" / "b0.png", photos / "0" / "a.png")
    with pytest.raises(ReportedError, match="photos has changed while its images were read: run again"):
        index_images.task_function(folder=found.folder, stamp=found.stamp, images=ImageSettings())


def test_a_model_that_has_diverged_is_refused(trained, local_execution, photos, tmp_path):
    weights = torch.load(trained.model, weights_only=True)
    torch.save({name: value * float("nan") for name, value in weights.items()}, tmp_path / "diverged.pt")
    model = PythonPickledFile(str(tmp_path / "diverged.pt"), remote_path=False)
    inputs = {"data": folder_of(prepare("digits")), "folder": folder_of(photos), "options": OPTIONS}
    plan = plan_shards.task_function(model_state=model, **inputs)
    with pytest.raises(InputError, match="model_state must give finite scores, got NaN: it has diverged; use another"):
        predict_shard.task_function(shard=plan.shards[0], model_state=model, listing=plan.listing, **inputs)
    assert not part_path(plan.shards[0]).exists()
