"""A sweep over the settings of a LightningModule, as of a recipe's in examples/tabular/sweep.py."""

import csv

import pytest

from tests.commands import ROOT, output, typed
from tests.lightning.project import write_project

THEIRS = {
    "tabular.settings": "numerals.settings",
    "RecipeTraining, RunOptions": "LightningOptions, LightningTraining",
    'RecipeTraining("tabular.recipe:Tabular")': """LightningTraining(
    "numerals.model:LitNumerals", data="numerals.model:Numerals"
)""",
    "RunOptions": "LightningOptions",
    "reduction_factor=4": "largest=False",
    '"r2"': '"loss"',
    "[2, 16, 32, 64]": "[2, 32]",
}


@pytest.mark.slow
def test_the_trials_are_compared_by_a_measure_of_validation(tmp_path):
    write_project(tmp_path)
    text = (ROOT / "examples" / "tabular" / "sweep.py").read_text()
    for ours, theirs in THEIRS.items():
        assert ours in text
        text = text.replace(ours, theirs)
    (tmp_path / "sweep.py").write_text(text)
    command = """pyflyte run sweep.py sweep_wf --settings '{"epochs": 2}' --options '{"nproc": 1}'"""
    done = typed(command, tmp_path)
    with open(output(done, "table"), newline="") as file:
        better, worse = csv.DictReader(file)
    assert (better["width"], worse["width"]) == ("32", "2")
    assert float(better["validation_loss"]) < float(worse["validation_loss"])
    assert f"width 32: validation loss {float(better['validation_loss']):.4f}" in done.stderr
