"""A sweep over the settings of a user's recipe, with successive halving."""

import csv
import re

import pytest

from tests.commands import output, pyflyte
from tests.examples import project

SWEEP = '{"values": {"width": [2, 64]}, "measure": "loss", "largest": false, "reduction_factor": 2}'
SETTINGS = '{"epochs": 8, "validation_fraction": 0.2}'


@pytest.mark.slow
def test_the_worse_one_stops_early_and_the_better_is_trained_to_its_end():
    arguments = ["--sweep", SWEEP, "--settings", SETTINGS, "--options", '{"nproc": 1}']
    done = pyflyte("tabular/sweep.py", "sweep_wf", *arguments, cwd=project())
    with open(output(done, "table"), newline="") as file:
        better, worse = csv.DictReader(file)
    trained = re.findall(r"Trial (\d) of 2: width \d+, to epoch (\d) of 8", done.stderr)
    assert trained == [("1", "4"), ("2", "4"), (better["trial"], "8")]
    assert "Continues from final-checkpoint, after epoch 4" in done.stderr
    assert "Trained:  12 epochs instead of 16" in done.stderr
    assert (better["trained_epochs"], worse["trained_epochs"]) == ("8", "4")
    assert float(better["validation_loss"]) < float(worse["validation_loss"])
    assert f"width {better['width']}: validation loss {float(better['validation_loss']):.4f}" in done.stderr
    assert f'"width": {better["width"]}' in done.stdout
