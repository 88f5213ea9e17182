"""The workflows of the other datasets: the same machinery with recipes of their own, by the real pyflyte."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = {"fashion_mnist": "fashion_cnn", "cifar10": "resnet9_small"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_without_network_it_trains_on_the_stand_in_with_its_own_recipe(name, tmp_path):
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    settings = {**offline, "DDP_RUNS_DIR": str(tmp_path / "runs"), "DDP_DATA_DIR": str(tmp_path / "data")}
    command = ["pyflyte", "run", str(ROOT / "workflows" / f"{name}.py"), f"{name}_wf"]
    command += ["--hp", '{"epochs": 1, "train_fraction": 0.3, "flip": false}']
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"{name} cannot be downloaded here: this run trains on digits" in run.stderr
    assert re.search(r"Data: +digits, .* \(stand-in\)\n", run.stderr), "of its own dataset, not of MNIST"
    (accuracy,) = re.findall(r"epoch_accuracies=\[([\d.]+)]", run.stdout)
    assert float(accuracy) > 0.4  # after 30 steps; by chance it would be 0.1
    assert len(re.findall(r"'\d': [\d.]+", run.stdout.partition("class_accuracies={")[2].partition("}")[0])) == 10
    (report,) = (tmp_path / "runs").glob("*/report.html")
    assert f"{WORKFLOWS[name]}, run" in report.read_text(), "partial --hp keeps the workflow's own defaults"


def test_a_workflow_differs_from_mnist_in_what_differs():
    mnist = (ROOT / "workflows" / "mnist.py").read_text().splitlines()
    for name in WORKFLOWS:
        other = (ROOT / "workflows" / f"{name}.py").read_text().splitlines()
        assert len(other) == len(mnist)
        assert sum(ours != theirs for ours, theirs in zip(mnist, other, strict=True)) <= 10
