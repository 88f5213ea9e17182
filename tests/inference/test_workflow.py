"""Batch prediction: pyflyte, and the commands of the pods, on real digits."""

import csv
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from flyteidl.core.literals_pb2 import Literal, LiteralCollection
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile
from PIL import Image

from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.inference.shards import InferenceOptions
from scripts.dry_run import decode
from tests.commands import ROOT, output, pyflyte, start_pyflyte, words
from tests.once import trained_classifier
from tests.packages import full_package
from tests.pod import Pod, literal, package_for_here

INFERENCE = str(ROOT / "workflows" / "inference.py")


@pytest.fixture(scope="module")
def trained():
    return trained_classifier(model="fashion_cnn")  # neither this nor the dataset is the default


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --- a local run ---


@pytest.mark.slow
def test_killed_run_keeps_its_finished_shards_and_ends_as_the_evaluation_did(trained, tmp_path):
    options = '{"shards": 8}'
    command = [INFERENCE, "inference_wf", "--model_state", str(trained.model), "--options", options]
    running = start_pyflyte(*command, cwd=tmp_path)
    assert running.stderr is not None
    assert any(line.startswith("Shard 1 of 8: 37 images") for line in running.stderr)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()

    again = pyflyte(*command, cwd=tmp_path)
    assert "Shard 1 of 8: already predicted" in again.stderr
    assert "Shard 8 of 8: 37 images in" in again.stderr, "it was killed before that"
    assert len(re.findall("^Shard ", again.stderr, re.MULTILINE)) == 8
    assert f"labelled=296, accuracy={trained.accuracy}" in again.stdout

    rows, of_training = (
        rows_of(output(again, "predictions")),
        np.load(trained.model.parent / "logs" / "predictions.npy"),
    )
    assert [int(row["image"]) for row in rows] == list(range(296))
    assert [int(row["prediction"]) for row in rows] == of_training.argmax(1).tolist()
    assert [float(row["score"]) for row in rows] == pytest.approx(np.exp(of_training.max(1)), abs=1e-4)

    part = max((Path(os.environ["DDP_RUNS_DIR"]) / "shards").iterdir())
    part.unlink()
    lost_one = pyflyte(*command, cwd=tmp_path)
    assert len(re.findall("already predicted", lost_one.stderr)) == 7
    assert len(re.findall("images in", lost_one.stderr)) == 1
    assert part.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model_state", "nowhere.pt"], "valid file path, nowhere.pt"),
        (["--folder", ""], "--folder must be a path or a URL, got '': name one, or leave --folder out"),
        (["--folder", "."], "folder must contain image files"),
        (["--model_state", INFERENCE, "--options", '{"dataset": "digits"}'], "model_state must be a state_dict"),
    ],
)
def test_bad_input_is_one_error(tmp_path, arguments, said):
    assert said in words(pyflyte(INFERENCE, "inference_wf", *arguments, status=2, cwd=tmp_path).stderr)


# --- pods ---


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Six real digits as image files of several kinds, and two files that are none."""
    folder = tmp_path_factory.mktemp("photos")
    images, labels = prepared.open_split(prepare("digits"), "test")
    for number in range(6):
        (folder / str(labels[number])).mkdir(exist_ok=True)
        image = Image.fromarray(images[number, 0]).convert("RGB" if number % 2 else "L").resize((112, 112))
        image.save(folder / str(labels[number]) / f"{number}.{'png' if number < 4 else 'jpg'}")
    (folder / "notes.txt").write_text("no image")
    (folder / "cut.png").write_bytes((folder / str(labels[0]) / "0.png").read_bytes()[:60])
    (folder / ".hidden.png").touch()
    return folder


def map_task(registered):
    name = "flyte_ddp.inference.task.map_predict_shard"
    (task,) = (task for found, task in registered.tasks.items() if found.startswith(name))
    return task


@pytest.mark.slow
def test_pods_predict_a_shard_and_gather_it(trained, photos, tmp_path):
    tasks = package_for_here().tasks
    data = literal(FlyteDirectory(str(prepare("digits")), remote_directory=False))
    model = literal(PythonPickledFile(str(trained.model), remote_path=False))
    folder = literal(FlyteDirectory(str(photos), remote_directory=False), FlyteDirectory | None)
    given = {"model_state": model, "folder": folder, "options": literal(InferenceOptions(shards=1))}
    checked = Pod(tasks["flyte_ddp.inference.task.resolve_inputs"], given, tmp_path / "check").run_here()
    assert checked["dataset"].scalar.primitive.string_value == "digits"
    fixed = {"data": data, "folder": folder, "options": checked["options"]}
    inputs = {"model_state": model, **fixed}
    plan = Pod(tasks["flyte_ddp.inference.task.plan_shards"], inputs, tmp_path / "plan").run()
    shards, inputs["listing"], fixed["listing"] = plan["shards"], plan["listing"], plan["listing"]
    assert [decode(shard)["last"] for shard in shards.collection.literals] == [8]

    which = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "SHARD", "SHARD": "0"}
    mapped, inputs["shard"] = map_task(package_for_here()), shards
    part = Pod(mapped, inputs, tmp_path / "shard", environment=which).run()["o0"]
    parts = Literal(collection=LiteralCollection(literals=[part]))
    pod = Pod(tasks["flyte_ddp.inference.gather.gather_shards"], {"parts": parts, **fixed}, tmp_path / "gather")
    outputs = pod.run()
    rows = rows_of(outputs["predictions"].scalar.blob.uri)
    readable = [row for row in rows if not row["error"]]
    assert [row["image"] for row in rows if row["error"]] == ["cut.png", "notes.txt"]
    assert len(readable) == 6
    assert all(row["label"] == row["image"].partition("/")[0] == row["prediction"] for row in readable)
    assert decode(outputs["summary"])["accuracy"] == 1.0
    page = Path(outputs["report"].scalar.blob.uri).read_text()
    assert page.count('src="data:image/png') == 6
    assert "not an image" in page
    assert (pod.folder / "deck.html").exists()


def test_map_task_is_registered_with_its_retries_and_so_many_at_a_time():
    registered = full_package()
    metadata = map_task(registered).metadata
    assert metadata.retries.retries == 3
    assert metadata.discoverable
    assert list(metadata.cache_ignore_input_vars) == ["model_state", "data", "folder", "listing", "options"]
    nodes = registered.workflows["workflows.inference.inference_wf"].template.nodes
    (mapped,) = (node.array_node for node in nodes if node.HasField("array_node"))
    assert mapped.parallelism == 3
    assert mapped.min_success_ratio == 1
