"""Export of a built-in classifier, as pyflyte runs it; its files, as those use them who have only the files."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.sources.datasets import prepare
from tests.commands import output, pyflyte, start_pyflyte
from tests.once import trained_classifier

pytestmark = pytest.mark.slow

OPTIONS = {"dataset": "digits", "model": "fashion_cnn"}
EXPORT = ("workflows/export.py", "export_wf", "--model_state")


@pytest.fixture(scope="module")
def trained():
    """A network with batch norm, of which MNIST's would not load the weights."""
    return trained_classifier(model="fashion_cnn")


@pytest.fixture(scope="module")
def exported(trained):
    """Its network and dataset stand in its metadata. All formats, which take seconds, has test_folder.py."""
    done = pyflyte(*EXPORT, str(trained.model), "--options", '{"formats": "safetensors"}')
    return done, Path(output(done, "model"))


def test_it_gives_the_accuracy_of_the_training(trained, exported):
    done, folder = exported
    assert f"model.safetensors: accuracy {trained.accuracy:.6g} on the test split" in done.stderr
    assert sorted(file.name for file in folder.iterdir()) == [
        "model.json", "model.safetensors", "model_card.html", "model_card.md",
    ]  # fmt: skip


def test_the_card_has_data_measures_classes_inputs_and_how_to_load_it(trained, exported):
    _, folder = exported
    description = prepared.read_description(prepare("digits"))
    for card in (folder / "model_card.md", folder / "model_card.html", folder.parent / "report.html"):
        text = card.read_text().replace("\\", "").replace("&#34;", '"')
        for fact in (
            description.digest, f"{trained.accuracy:.6g}", "images: (batch, 1, 28, 28) float32", "epochs 1",
            'load_model("model.safetensors")', "torch",
        ):  # fmt: skip
            assert fact in text, (card, fact)
    metadata = json.loads((folder / "model.json").read_text())
    assert metadata["measures"]["accuracy"] == pytest.approx(trained.accuracy, abs=1e-4)
    assert (metadata["facts"]["network"], len(metadata["facts"]["classes"])) == ("fashion_cnn", 10)


def test_killed_in_the_middle_it_leaves_no_half_of_a_model(trained):
    """By kill -9, to all of its processes, once the second of three files has been begun."""
    before = runs()
    running = start_pyflyte(*EXPORT, str(trained.model), "--options", json.dumps(OPTIONS))
    while not [file for run in runs() - before for file in run.glob(".model.*.partial/model.pt2")]:
        with suppress(subprocess.TimeoutExpired):
            running.wait(0.01)
            raise AssertionError("it ended before it was to be killed")
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    (killed,) = runs() - before
    assert not (killed / "model").exists()
    assert not (killed / "report.html").exists()


def runs():
    return set(Path(os.environ["DDP_RUNS_DIR"]).glob("*-export-*"))
