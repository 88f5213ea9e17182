"""Folders of image files through pyflyte."""

import re
from pathlib import Path

import pytest

from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import write_folder
from tests import commands
from tests.commands import ROOT, words

WORKFLOW = str(ROOT / "workflows" / "image_folder.py")
IMAGES = '{"image_size": 28, "channels": "grayscale"}'


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """1,200 real digits as files, and one more that is none."""
    folder = tmp_path_factory.mktemp("files") / "digits"
    images, labels = open_split(prepare("digits"), "train")
    write_folder(folder, [f"digit {digit}" for digit in range(10)], images[:1200], labels[:1200])
    (folder / "digit 3" / "broken.png").write_bytes(b"no image")
    return folder


def pyflyte(workflow: str, *arguments: str, status: int = 0, cwd: Path = ROOT) -> str:
    done = commands.pyflyte(WORKFLOW, workflow, *arguments, status=status, cwd=cwd)
    return words(done.stdout + done.stderr)


@pytest.mark.slow
def test_it_trains_on_a_folder_and_follows_what_becomes_of_it(digits):
    arguments = ["--folder", str(digits), "--images", IMAGES, "--hp", '{"epochs": 4, "precision": "float32"}']
    said = pyflyte("image_folder_wf", *arguments)
    assert "1 of 1,201 image files" in said
    assert "digit 3/broken.png (not an image)" in said
    assert float(re.findall(r"\baccuracy=([\d.]+)", said)[0]) >= 0.95
    page = Path(re.findall(r"report=([^,)]+)", said)[0]).read_text()
    assert "digit 3/broken.png (not an image)" in page
    assert page.count("<img") > 20, "samples, decoded from their files"
    again = pyflyte("image_folder_wf", *arguments, "--options", '{"loader_workers": 0}')
    assert "Train Epoch" not in again, "the same images give the same result"
    (digits / "digit 3" / "broken.png").unlink()
    (model,) = set(re.findall(r"model_state=([^,]+)", again))
    said = pyflyte("image_folder_wf", *arguments[:-1], '{"epochs": 1}', "--init", model)
    assert "Starts from 8 of 8 tensors of model.pt" in said
    assert "1,200" not in said
    assert "cannot be read" not in said
    assert "Train Epoch" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--folder", "nowhere"], ["nowhere does not exist", "one sub-folder of image files per class"]),
        (["--folder", "."], ["has no image files", "sub-folder"]),
    ],
)
def test_a_wrong_input_is_a_usage_error_before_anything_is_done(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.setenv("DDP_DATA_DIR", str(tmp_path / "data"))
    said = pyflyte("image_folder_wf", *arguments, status=2, cwd=tmp_path)
    # lines are broken in the middle of a path
    assert all(word.replace(" ", "") in said.replace(" ", "") for word in expected), said
    assert not (tmp_path / "data").exists()
