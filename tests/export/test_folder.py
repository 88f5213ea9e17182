"""Export of a classifier of image files, as pyflyte runs it; its files, as those use them who have only these."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import write_folder
from tests import commands
from tests.commands import ROOT, output, words

pytestmark = pytest.mark.slow

CLASSES = [f"<{digit}> & so on" for digit in range(10)]
IMAGES = '{"image_size": 28, "channels": "rgb"}'
HP = '{"epochs": 1, "batch_size": 16, "model": "fashion_cnn"}'


class Exported(NamedTuple):
    photos: Path
    model: Path
    accuracy: float
    said: str
    folder: Path


def pyflyte(workflow, *arguments, status=0):
    file = "image_folder.py" if workflow == "image_folder_wf" else "export.py"
    return commands.pyflyte(f"workflows/{file}", workflow, *arguments, status=status)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Digits as PNG files; a network with batch norm for them, which nobody names to the export."""
    photos = tmp_path_factory.mktemp("files") / "photos"
    photos.mkdir()
    for split in ("train", "test"):
        images, labels = open_split(prepare("digits"), split)
        write_folder(photos / split, CLASSES, images[:200], labels[:200])
    inputs = ["--folder", str(photos), "--images", IMAGES]
    trained = pyflyte("image_folder_wf", *inputs, "--hp", HP)
    model, accuracy = (output(trained, name) for name in ("model_state", "accuracy"))
    done = pyflyte("export_folder_wf", *inputs, "--model_state", model)
    return Exported(photos, Path(model), float(accuracy), done.stderr, Path(output(done, "model")))


PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from onnxruntime import InferenceSession
model, folder, photos = map(Path, sys.argv[1:])
facts = json.loads((folder / "model.json").read_text())["facts"]
mean, std = (torch.tensor(facts[name]).view(-1, 1, 1) for name in ("mean", "std"))
files = sorted((photos / "test").glob("*/*.png"))
pixels = [torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) for file in files]
images = (torch.stack(pixels) / 255 - mean) / std
assert images.shape[1:] == tuple(facts["image_shape"])
session = InferenceSession(folder / "model.onnx")


def measure(network):
    with torch.inference_mode():
        found = torch.cat([network(part) for part in (images[:1], images[1:8], images[8:])]).argmax(1)
    print(np.mean([facts["classes"][guess] == file.parent.name for guess, file in zip(found, files)]))


measure(torch.export.load(folder / "model.pt2").module())
measure(lambda images: torch.tensor(session.run(None, {"images": images.numpy()})[0]))
assert "flyte_ddp" not in sys.modules, "which these files do not need"
from flyte_ddp.recipes.models import load_model
measure(load_model(folder / "model.safetensors"))
measure(load_model(model))
"""


def test_each_file_gives_the_accuracy_of_the_training_from_pixels_alone(exported):
    command = [sys.executable, "-c", PROGRAM, str(exported.model), str(exported.folder), str(exported.photos)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == 4 * [pytest.approx(exported.accuracy, abs=1e-4)]


def test_the_card_names_the_classes_and_what_the_images_are(exported):
    for file in ("model.safetensors", "model.pt2", "model.onnx"):
        assert f"{file}: accuracy {exported.accuracy:.6g} on the test split, the same as the model" in exported.said
    assert sorted(file.name for file in exported.folder.iterdir()) == [
        "model.json", "model.onnx", "model.pt2", "model.safetensors", "model_card.html", "model_card.md",
    ]  # fmt: skip
    text = (exported.folder / "model_card.md").read_text().replace("\\", "")
    assert 'InferenceSession("model.onnx").run(None, {"images": images})' in text
    assert text.startswith("# fashion_cnn, trained on photos\n")
    assert ", ".join(CLASSES) in text
    for fact in ("images: (batch, 3, 28, 28) float32", "epochs 1,", *(f"| {name} | " for name in CLASSES)):
        assert fact in text
    assert json.loads((exported.folder / "model.json").read_text())["facts"]["classes"] == CLASSES


@pytest.mark.parametrize(
    ("workflow", "arguments", "said"),
    [
        ("export_folder_wf", ["--folder", "PHOTOS"], """set --images '{"image_size": 28, "channels": "rgb"}'"""),
        ("export_wf", [], "but photos is a folder of images: run export_folder_wf with that folder"),
        (
            "export_folder_wf",
            ["--folder", "PHOTOS/train", "--images", IMAGES],
            "use weights, settings and data of the same training",
        ),
    ],
)
def test_what_the_model_was_not_trained_on_is_one_error(exported, workflow, arguments, said):
    arguments = [argument.replace("PHOTOS", str(exported.photos)) for argument in arguments]
    done = pyflyte(workflow, *arguments, "--model_state", str(exported.model), status=2)
    assert said in words(done.stderr)
