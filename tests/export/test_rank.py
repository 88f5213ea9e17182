"""The process that opens an exported file, and measures it."""

import pickle

import pytest

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import make_job, make_subject
from flyte_ddp.engine.load import load_recipe
from flyte_ddp.errors import DataError
from flyte_ddp.export.programs import record_call, save_weights
from flyte_ddp.export.rank import measure_file, write_formats
from flyte_ddp.export.settings import ExportJob, ExportOptions
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.launcher import ALONE
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import CPU
from flyte_ddp.settings import TrainingSettings
from tests.export.networks import Lines


def test_data_that_cannot_be_read_are_no_fault_of_the_file(tmp_path):
    job = make_job(make_subject(find_code("tests.export.networks:Lost"), TrainingSettings()))
    save_weights(tmp_path / "model.safetensors", load_recipe(job, CPU).model(), "{}")
    asked = job, "safetensors", str(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="sample 11 is gone"):
        measure_file(Environment(ALONE, 0, 0, "", threads=1), Link(), asked)


@pytest.mark.parametrize(
    ("recipe", "classes"),
    [("Lines", {"below", "above"}), ("Unscored", set()), ("Weighted", set()), ("OneHot", set())],
)
def test_a_measure_of_ones_own_may_leave_no_accuracies_by_class(tmp_path, recipe, classes):
    subject = make_subject(find_code(f"tests.export.networks:{recipe}"), TrainingSettings())
    path = tmp_path / "first.safetensors"
    job = make_job(subject, model_path=path)
    save_weights(path, load_recipe(job, CPU).model(), "{}")
    asked = ExportJob(job, str(tmp_path), ExportOptions(formats="safetensors"), {}, {}, {})
    written = write_formats(Environment(ALONE, 0, 0, "", threads=1), Link(), asked)
    assert written.classes.keys() == classes


class Refusing(Lines):
    def forward(self, model, batch):
        super().forward(model, batch)
        raise ValueError("too long")


def test_a_forward_that_fails_leaves_the_network_as_it_was():
    recipe = Refusing(TrainingSettings())
    model = recipe.model()
    with pytest.raises(ValueError, match="too long"):
        record_call(recipe, model, recipe.data("test"), 60)
    pickle.dumps(model)  # which a hook would prevent
