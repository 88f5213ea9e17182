"""Each example, as its user runs it, and on 1 and 3 ranks, and one killed in the middle."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.events import Event, StepLogged
from tests.commands import ROOT, pyflyte, same
from tests.examples import RECIPES, data_of, init_of, project, small, train_small, trained

# By the workflow: settings, and what the last epoch's measures have to be
ENOUGH: dict[str, tuple[dict[str, Any], str]] = {
    "autoencoder": ({"epochs": 3, "batch_size": 16}, "0 < loss < 0.08"),
    "charlm": (
        {"characters": 20_000, "batch_size": 8, "epochs": 2, "width": 16},
        "perplexity < 40 and accuracy > 0.1",
    ),
    "contrastive": ({"epochs": 3}, "retrieval > 0.15"),
    "finetune_images": ({"epochs": 2, "side": 32, "network": "test_convnext", "learning_rate": 1e-3}, "accuracy > 0.8"),
    "finetune_text": ({"epochs": 3, "lora_rank": 0, "batch_size": 16, "learning_rate": 3e-3}, "loss < 1.3"),
    "own_loop": ({"epochs": 4}, "accuracy > 0.85"),
    "resnet": ({"epochs": 3, "side": 32, "batch_size": 8, "learning_rate": 3e-4}, "accuracy > 0.8"),
    "segmentation": ({"images": 400, "batch_size": 16}, "iou > 0.5 and dice > iou"),
    "stream": ({}, "within > 0.9"),
    "tabular": ({}, "0.4 < r2 < 0.6"),
}


def test_an_example_is_short_and_its_settings_need_no_torch():
    assert {path.parent.name for path in ROOT.glob("examples/*/recipe.py")} == set(RECIPES)
    for name in RECIPES:
        folder = ROOT / "examples" / name
        lines = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
        assert lines["recipe.py"] <= 60
        assert lines["workflow.py"] <= (40 if name == "stream" else 30)  # which has a task more
        assert lines["__init__.py"] == 0
        docstring = ast.get_docstring(ast.parse((folder / "workflow.py").read_text()))
        assert docstring is not None
        assert f"pyflyte run {name}/workflow.py {name}_wf" in docstring
        assert f"make example NAME={name}" in (ROOT / "examples" / "README.md").read_text()
        assert "torch" not in (folder / "settings.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "autoencoder", "own_loop"])
def test_the_workflow_of_an_example_trains(name):
    settings, enough = ENOUGH[name]
    command = [f"{name}/workflow.py", f"{name}_wf", "--settings", json.dumps(settings)]
    if name in ("finetune_images", "resnet"):
        command += ["--folder", str(data_of(name))]
    if init := init_of(name):
        command += ["--init", init]
    if name == "finetune_images":
        command += [
            "--head",
            json.dumps({**settings, "epochs": 1, "freeze": "stem, stages", "init_leave_out": "head.fc"}),
        ]
    done = pyflyte(*command, cwd=project())
    if name == "tabular":  # the others only learn something else
        (warned,) = re.findall(r"warnings=(\[.*?])", done.stdout)
        # A busy machine has slow ranks; whatever else is warned of would be the example's fault
        assert all("computes" in one or "waits for its data" in one for one in ast.literal_eval(warned)), warned
    (found,) = re.findall(r"epoch_measures=(\[.*?])", done.stdout)
    epochs = ast.literal_eval(found)
    assert len(epochs) == settings.get("epochs", len(epochs))
    assert eval(enough, {}, epochs[-1]), epochs
    (report,) = re.findall(r"report=([^,]+),", done.stdout)
    assert ("image, " in Path(report).read_text()) == (name in ("autoencoder", "segmentation"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["charlm", "finetune_text", "segmentation"])
def test_with_virtual_ranks_the_result_has_the_same_bits_on_1_and_3_ranks(tmp_path, name):
    found = []
    for nproc in (1, 3):
        events: list[Event] = []
        result = train_small(name, tmp_path / f"{nproc}", events.append, nproc, 60, virtual_ranks=4)
        losses = [event.measures for event in events if isinstance(event, StepLogged)]
        found.append((losses, result.epochs[-1].test, torch.load(result.model_path, weights_only=True)))
    (losses, measures, weights), others = found
    assert len(losses) > 2
    assert others[:2] == (losses, measures)
    assert same(others[2], weights)


@pytest.mark.slow
def test_killed_in_the_middle_the_same_call_ends_with_the_same_bits(tmp_path):
    name = "charlm"
    kill_all(name, tmp_path)
    assert (tmp_path / "checkpoint").exists()
    events: list[Event] = []
    result = train_small(name, tmp_path, events.append, 3)
    assert min(event.step for event in events if isinstance(event, StepLogged)) > 1
    assert same(torch.load(result.model_path, weights_only=True), trained(name, 3).weights)


def kill_all(name, output):
    """The same training in a process of its own, killed with its ranks after the first checkpoint."""
    program = f"""
import os, signal
from {name}.settings import Settings
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

def kill(event):
    if type(event).__name__ == "CheckpointWritten":
        os.killpg(0, signal.SIGKILL)

if __name__ == "__main__":
    settings, options = Settings(**{small(name)!r}), RunOptions(nproc=3, checkpoint_seconds=0, tracking="off")
    more = {{"data": {data_of(name)!r}, "init": {init_of(name)!r}, "output": {str(output)!r}, "on_event": kill}}
    train("{name}.recipe:{RECIPES[name]}", settings, options, **more)
"""
    (output.parent / "kill.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "kill.py"], cwd=output.parent, env={**os.environ, "PYTHONPATH": f"{ROOT}:{project()}"},
        start_new_session=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
