"""The process that opens an exported file, and measures it."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.job import make_job, make_subject
from flyte_ddp.engine.load import load_recipe
from flyte_ddp.errors import DataError
from flyte_ddp.export.card import make_card
from flyte_ddp.export.programs import Call, format_call, record_call, save_weights
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


def written_by(recipe, folder):
    """The export of an untrained network of tests/export/networks.py, and what is known of the network."""
    path = folder / "first.safetensors"
    subject = make_subject(find_code(f"tests.export.networks:{recipe}"), TrainingSettings())
    job = make_job(subject, model_path=path)
    save_weights(path, load_recipe(job, CPU).model(), "{}")
    asked = ExportJob(job, str(folder), ExportOptions(formats="safetensors"), {}, {}, {})
    return asked, write_formats(Environment(ALONE, 0, 0, "", threads=1), Link(), asked)


@pytest.mark.parametrize(
    ("recipe", "classes"),
    [("Lines", {"below", "above"}), ("Unscored", set()), ("Weighted", set()), ("OneHot", set())],
)
def test_a_measure_of_ones_own_may_leave_no_accuracies_by_class(tmp_path, recipe, classes):
    assert written_by(recipe, tmp_path)[1].classes.keys() == classes


def test_the_card_names_the_folder_that_the_network_is_made_from(tmp_path):
    asked, written = written_by("Lines", tmp_path)
    for init, more in ((tmp_path, ", init_path=INIT"), (tmp_path / "first.safetensors", ""), (None, "")):
        job = dataclasses.replace(asked.job, init=init)
        card = make_card(dataclasses.replace(asked, job=job), written, {"safetensors": written.measured})
        assert f'load_model("model.safetensors"{more})' in card.markdown.replace("\\", "")


class Rested(nn.Module):
    def forward(self, input_1, *rest):
        return input_1 + rest[0]


def test_an_input_of_args_has_no_other_inputs_name():
    inputs = torch.ones(2, 1), torch.ones(2, 1)
    assert format_call(Rested(), Call(2, inputs, {}, inputs[0])) == "input_1, input_input_1"


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
