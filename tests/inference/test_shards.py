"""What keeps a file from being the weights of a network, and image files in another form than the network's."""

import numpy as np
import pytest
import torch
from PIL import Image

from flyte_ddp.data.image_files import decode
from flyte_ddp.inference.images import decode_all
from flyte_ddp.inference.rank import find_fault
from flyte_ddp.inference.shards import ModelFile
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.recipes.models import build_model

ALONE = Environment(World(1, 1, "gloo", "cpu"), 0, 0, "", 1)


def weights(**changed):
    return {**build_model("mnist_cnn", 1, (1, 28, 28), 10).state_dict(), **changed}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (weights(), ""),
        (weights(**{"fc2.weight": torch.zeros(5, 500)}), "has fc2.weight of shape (5, 500) instead of (10, 500)"),
        (weights(extra=torch.zeros(1)), "another network than mnist_cnn for images of (1, 28, 28) and 10 classes"),
        (
            {f"module.{name}": value for name, value in weights().items()},
            "lacks conv1.weight (and 7 more), has module.conv1.weight (and 7 more)",
        ),
        ([1, 2], "holds list and not a state_dict"),
        (torch.nn.Linear(2, 2), "is no file of weights that can be read safely"),
    ],
)
def test_fault_of_a_file_is_named(tmp_path, content, says):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    fault = find_fault(ALONE, None, ModelFile(str(path), "mnist_cnn", (1, 28, 28), 10))  # type: ignore[arg-type]
    assert says in fault
    assert bool(fault) == bool(says)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK"])
def test_image_of_any_mode_is_decoded_as_it_looks(tmp_path, mode):
    path = tmp_path / "half.tiff"
    half = Image.new("L", (40, 20))
    half.paste(255, (20, 0, 40, 20))
    half.convert(mode).save(path)
    for channels in (1, 3):
        image = decode(path, (channels, 8, 8))
        assert image.shape == (channels, 8, 8)
        assert image.dtype == np.uint8
        assert image[:, :, :3].max() < 10
        assert image[:, :, 5:].min() > 245


def test_photo_is_turned_upright(tmp_path):
    path = tmp_path / "turned.png"
    top = Image.new("L", (8, 8))
    top.paste(255, (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    top.save(path, exif=exif)
    assert decode(path, (1, 8, 8))[0, 0, 0] == 0


def test_unreadable_file_is_a_reason_not_an_end(tmp_path):
    (tmp_path / "words.png").write_text("no image")
    images, problems = decode_all([tmp_path / "words.png", tmp_path / "nowhere.png"], (1, 8, 8))
    assert images.shape == (2, 1, 8, 8)
    assert problems == ["not an image", "No such file or directory"]
