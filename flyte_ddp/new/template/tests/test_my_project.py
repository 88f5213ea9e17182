"""Trains a small run with two ranks and checks the result."""

from pathlib import Path

import torch

from flyte_ddp import RunOptions, train
from my_project.recipe import Digits
from my_project.settings import Settings


def test_it_learns_and_its_model_can_be_loaded(tmp_path: Path) -> None:
    settings = Settings(epochs=5)
    result = train("my_project.recipe:Digits", settings, RunOptions(nproc=2), output=tmp_path)
    accuracy = result.epochs[-1].test["accuracy"]
    assert accuracy > 0.85
    assert not result.warnings

    images, labels = Digits(settings).data("test")
    predicted = Digits.load_model(result.model_path, settings)(images).argmax(1)
    assert torch.isclose((predicted == labels).float().mean(), torch.tensor(accuracy), atol=0.01)
