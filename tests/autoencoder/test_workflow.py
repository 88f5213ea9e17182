"""The autoencoder under Lightning: real ranks, real pyflyte, real digits."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.autoencoder.network import load_autoencoder
from flyte_ddp.autoencoder.settings import AutoencoderHyperparameters
from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.errors import InputError
from flyte_ddp.lightning.settings import LightningOptions
from tests.commands import ROOT, pyflyte, pyflyte_process, words
from tests.pod import Pod, is_whole, literal, package_for_here, small_dataset
from workflows.autoencoder import autoencoder_task, autoencoder_wf

WORKFLOW = (str(ROOT / "workflows" / "autoencoder.py"), "autoencoder_wf")
# 74 steps an epoch, and in its last one three ranks have unequal shares: 1,376 images 8 times are 73 batches and 58
HP: dict[str, Any] = {"dataset": "digits", "epochs": 2, "batch_size": 150, "learning_rate": 0.004}


@pytest.fixture(scope="module")
def by_pyflyte(tmp_path_factory):
    """A run as a user types it, from another folder."""
    arguments = ["--hp", json.dumps(HP), "--options", '{"nproc": 2, "tracking": "tensorboard"}']
    return pyflyte_process(*WORKFLOW, *arguments, cwd=tmp_path_factory.mktemp("elsewhere"))


def folder_of(run) -> Path:
    (model,) = re.findall(r"model_state=([^,]+),", run.stdout)
    return Path(model).parent


def events_in(logs: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (logs / "tensorboard").glob("*/*")
    return EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()


def has_steps(logs: Path) -> bool:
    return any(b"train/loss" in file.read_bytes() for file in logs.glob("tensorboard/*/*"))


def losses_of(run, name):
    (found,) = re.findall(rf"{name}=\[([^]]*)]", run.stdout)
    return [float(loss) for loss in found.split(", ")]


@pytest.mark.slow
def test_two_ranks_under_lightning_learn_and_say_only_what_there_is_to_say(by_pyflyte):
    for count in ("train_samples=1376, ", "test_samples=296, "):
        assert count in by_pyflyte.stdout
    assert "1,376 training and 125 validation samples" in by_pyflyte.stderr
    first, last = losses_of(by_pyflyte, "validation_losses")
    assert last < first < 0.06
    assert re.search(r"under Lightning [\d.]+, DDPStrategy", by_pyflyte.stderr)
    starts = (
        "Running|Start|Live report|digits|under Lightning|Train Epoch|Epoch|Last|Data|Loss|Seconds|Weights|Model|Report"
        "|Next"
    )
    said = [line for line in by_pyflyte.stderr.splitlines() if line]
    assert all(re.match(starts, line) for line in said), by_pyflyte.stderr


@pytest.mark.slow
def test_the_exported_network_has_the_reported_loss(by_pyflyte):
    folder = folder_of(by_pyflyte)
    network = load_autoencoder(folder / "model.pt")
    images = torch.from_numpy(open_split(prepare("digits"), "test")[0]) / 255
    with torch.inference_mode():
        loss = (network(images) - images.flatten(1)).square().mean().item()
        codes = network.encoder(images).numpy()
    (reported,) = re.findall(r"test_loss=([^,)]+)\)", by_pyflyte.stdout)
    assert loss == pytest.approx(float(reported), rel=1e-5)
    with np.load(folder / "logs" / "test.npz") as encoded:
        assert encoded["codes"] == pytest.approx(codes, abs=1e-5)


@pytest.mark.slow
def test_the_report_shows_reconstructions_and_codes_and_the_tracker_has_step_and_epoch_losses(by_pyflyte):
    folder = folder_of(by_pyflyte)
    report = (folder / "report.html").read_text()
    assert report.count('and reconstructed"') == 10
    assert "was trained on\ndigits" not in report, "they were asked for"
    assert "Codes of 296 test images in 3D, coloured by class" in report
    assert len(report) < 1_000_000
    assert not re.search(r'(src|href)="https?:', report)

    written = events_in(folder / "logs")
    assert len(written.Scalars("train/loss")) == 2 * (74 // 10 + 1)
    values = [scalar.value for scalar in written.Scalars("validation/loss")]
    assert values == pytest.approx(losses_of(by_pyflyte, "validation_losses"))


@pytest.mark.slow
def test_one_and_three_ranks_give_the_same_as_two(by_pyflyte, monkeypatch):
    monkeypatch.setenv("FLYTE_LOCAL_CACHE_ENABLED", "false")
    two, models = (
        torch.load(folder_of(by_pyflyte) / "model.pt", weights_only=True),
        {folder_of(by_pyflyte) / "model.pt"},
    )
    for nproc in (1, 3):
        options = LightningOptions(nproc=nproc, tracking="off")
        outputs = autoencoder_wf(hp=AutoencoderHyperparameters(**HP), options=options)
        assert Path(outputs.model_state.path) not in models, "cached"
        models.add(Path(outputs.model_state.path))
        weights = torch.load(outputs.model_state.path, weights_only=True)
        # Adam enlarges the rounding of another number of threads wherever a gradient is nearly zero: not by element
        assert all(torch.dist(weights[name], two[name]) < 0.05 * two[name].norm() for name in two)
        assert outputs.validation_losses == pytest.approx(losses_of(by_pyflyte, "validation_losses"), rel=1e-3)


@pytest.mark.slow
def test_retry_goes_on_from_the_checkpoint_of_a_killed_pod(tmp_path):
    hp = AutoencoderHyperparameters(epochs=40, batch_size=100, learning_rate=0.01)
    inputs = {"hp": literal(hp), "data": small_dataset(tmp_path / "small")}
    inputs["options"] = literal(LightningOptions(tracking="tensorboard"))
    task = package_for_here().tasks["workflows.autoencoder.autoencoder_task"]
    data = FlyteDirectory(str(tmp_path / "small"), remote_directory=False)
    undisturbed = autoencoder_task(hp=hp, data=data, options=LightningOptions(tracking="off"))

    first = Pod(task, inputs, tmp_path / "killed")
    first.kill_when(lambda: is_whole(first.checkpoints / "checkpoint") and has_steps(first.logs))
    second = Pod(task, inputs, tmp_path / "retried", previous=first)
    outputs = second.run()
    assert "resuming from the checkpoint: epoch " in second.log
    for losses in ("train_losses", "validation_losses"):
        found = [value.scalar.primitive.float_value for value in outputs[losses].collection.literals]
        assert found == getattr(undisturbed, losses), "bit for bit"
    steps = [one.step for one in events_in(second.logs).Scalars("train/loss")]
    assert len(steps) == len({*steps}), "none is written twice"
    assert steps[0] == 10, "the file of the first attempt goes on"


# --- bad input ---


@pytest.mark.parametrize(
    ("hp", "options", "gpus", "words"),
    [
        ({"precision": "float16"}, {}, 0, ["float16 needs a GPU", "use bfloat16 or float32"]),
        ({"batch_size": 2}, {"nproc": 3}, 0, ["number of ranks (3)", "got 2", "start fewer ranks (nproc)"]),
        ({}, {}, -1, ["gpus must be at least 0 and at most 64, got -1"]),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_rank_is_started(hp, options, gpus, words):
    with pytest.raises(InputError) as raised:
        autoencoder_wf(
            gpus=gpus,
            hp=AutoencoderHyperparameters(dataset="digits", **hp),
            options=LightningOptions(tracking="off", **options),
        )
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("hp", "words"),
    [
        ({"limit_train_batches": 2.5}, ["a share of at most 1, or a whole number", "got 2.5"]),
        ({"precision": "int8"}, ["float32, bfloat16, float16", '"int8"']),
        ({"epoch": 1}, ["did you mean epochs?"]),
        ({"dataset": "cifar"}, ["auto, mnist, fashion_mnist, digits"]),
    ],
)
def test_a_wrong_hyperparameter_is_refused(hp, words):
    with pytest.raises(InputError) as raised:
        AutoencoderHyperparameters.from_json(json.dumps(hp))
    assert all(word in str(raised.value) for word in words), raised.value


def test_pyflyte_ends_with_a_usage_error_and_no_traceback():
    arguments = ["--hp", '{"dataset": "digits", "precision": "float16"}']
    assert "precision float16 needs a GPU" in words(pyflyte(*WORKFLOW, *arguments, status=2).stderr)


@pytest.mark.slow
def test_without_lightning_the_module_is_imported_and_says_what_to_install():
    program = """if True:
        import sys
        sys.modules["lightning"] = None  # as where it is not installed
        from workflows.autoencoder import autoencoder_task, autoencoder_wf
        from flyte_ddp.errors import InputError
        try:
            autoencoder_wf()
        except InputError as error:
            print(error.message)
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert 'pip install "flyte-ddp-training[lightning]"' in done.stdout, done.stderr
