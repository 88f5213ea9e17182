"""The workflows of the other datasets: the same machinery with recipes of their own."""

import re

import pytest

from tests.commands import OFFLINE, ROOT, pyflyte

WORKFLOWS = {"fashion_mnist": "fashion_cnn", "cifar10": "resnet9_small"}


@pytest.mark.slow
def test_without_network_it_trains_on_the_stand_in_with_its_own_recipe(tmp_path):
    name = "cifar10"
    places = {"DDP_RUNS_DIR": str(tmp_path / "runs"), "DDP_DATA_DIR": str(tmp_path / "data")}
    command = [f"workflows/{name}.py", f"{name}_wf", "--hp", '{"epochs": 1, "train_fraction": 0.3, "flip": false}']
    run = pyflyte(*command, environment={**places, **OFFLINE})
    assert f"{name} cannot be downloaded here: this run trains on digits" in run.stderr
    assert re.search(r"Data: +digits, .* \(stand-in\)\n", run.stderr), "of its own dataset, not of MNIST"
    (accuracy,) = re.findall(r"epoch_accuracies=\[([\d.]+)]", run.stdout)
    assert float(accuracy) > 0.4  # after 30 steps; by chance it would be 0.1
    assert len(run.stdout) < 1200, "what is long stands in the report"
    (report,) = (tmp_path / "runs").glob("*/report.html")
    text = report.read_text()
    assert f"{WORKFLOWS[name]}, run" in text, "partial --hp keeps the workflow's own defaults"
    assert "Accuracy by class" in text


def test_a_workflow_differs_from_mnist_in_what_differs():
    mnist = (ROOT / "workflows" / "mnist.py").read_text().splitlines()
    for name in WORKFLOWS:
        other = (ROOT / "workflows" / f"{name}.py").read_text().splitlines()
        assert len(other) == len(mnist)
        assert sum(ours != theirs for ours, theirs in zip(mnist, other, strict=True)) <= 10
