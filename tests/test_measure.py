"""The workflows of examples/measure, as their users run them."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.commands import output, pyflyte
from tests.examples import project
from tests.once import trained_classifier

pytestmark = pytest.mark.slow


def measured(name, *arguments):
    """The values of the first output that is a dict of numbers, and the page."""
    done = pyflyte(f"measure/{name}.py", f"{name}_wf", "--repeats", "2", *arguments, cwd=project())
    values = ast.literal_eval(re.findall(r"(?:seconds|images_per_second)=(\{.*?})", done.stdout)[0])
    assert all(value > 0 for value in values.values())
    return values, Path(output(done, "report")).read_text(), done.stdout


def test_inference_is_timed_over_batch_sizes_of_a_network_or_of_a_trained_model():
    values, page, _ = measured("inference", "--batch_sizes", "[4, 1]")
    assert [*values] == ["1", "4"]
    assert "MnistCNN, float32, images [1, 28, 28] on the " in page
    assert page.count("<svg") == 1
    model = str(trained_classifier(model="fashion_cnn").model)
    assert "FashionCNN" in measured("inference", "--batch_sizes", "[1]", "--model_state", model)[1]


def test_loading_is_timed_against_workers_and_a_batch_is_shown(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "dogs").mkdir()
    for folder, shade in (("cats", 0), ("dogs", 255)):
        for number in range(10):
            Image.new("RGB", (40, 30), (shade, 0, number)).save(tmp_path / folder / f"{number}.png")
    values, page, _ = measured("loading", "--folder", str(tmp_path), "--workers", "[1, 0]", "--batch_size", "4")
    assert [*values] == ["0", "1"]
    assert "20 images of 64 x 64, batches of 4; median and range of 2 passes" in page
    assert page.count("<svg") == 2
    assert "data:image/png;base64" in page


def test_devices_are_listed_and_those_that_are_chosen_timed():
    small = ("--network", "mnist_cnn", "--image_shape", "[1, 28, 28]", "--batch_size", "4")
    values, page, said = measured("devices", "--devices", '["cpu"]', *small)
    assert [*values] == ["cpu"]
    assert re.search(r"listed=\{'cpu': '.+ threads'", said)
    assert said.count("cuda:") >= torch.cuda.device_count()
    assert "mnist_cnn, 4 images [1, 28, 28] a step" in page


def test_what_cannot_be_measured_is_refused():
    project()
    devices, inference, loading = (
        importlib.import_module(f"measure.{name}") for name in ("devices", "inference", "loading")
    )
    with pytest.raises(
        ValueError, match=r"devices must be among cpu.* got cuda:99, gpu: choose others, or none for all"
    ):
        devices.time_devices.task_function(["gpu", "cpu", "cuda:99"], "mnist_cnn", [1, 28, 28], 4, 1)
    with pytest.raises(ValueError, match=r"batch_sizes must be whole numbers from 1, got \[1, 0\]"):
        inference.time_inference.task_function([1, 0], "mnist_cnn", [1, 28, 28], None, 1)
    with pytest.raises(ValueError, match=r"workers must be whole numbers from 0, got \[-1\]"):
        loading.time_loading.task_function(None, [-1], 4, 8, 10, 1)
