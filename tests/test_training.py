"""What a plain call refuses before anything is started."""

from dataclasses import dataclass
from typing import Any

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.flyte1.platform import TaskError
from flyte_ddp.flyte1.recipe import RecipeTraining
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import name_of, train
from tests.engine.probe_recipes import Sound


def test_a_class_is_named_by_its_module():
    assert name_of(Sound) == "tests.engine.probe_recipes:Sound"


def test_a_class_that_ranks_cannot_import_is_refused_with_the_remedy(tmp_path):
    class Local(Recipe):
        pass

    with pytest.raises(InputError, match=r"got .*Local of tests.test_training: put it into a file of its own"):
        train(Local, TrainingSettings(), output=tmp_path)

    @dataclass(frozen=True)
    class Settings(TrainingSettings):
        pass

    with pytest.raises(InputError, match=r"^settings must be .* got .*Settings of tests.test_training: put it into"):
        train(Sound, Settings(), output=tmp_path)


def test_data_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"data must be an existing file or folder, got .*nowhere"):
        train(Sound, TrainingSettings(), data=tmp_path / "nowhere", output=tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"settings": {"epochs": 1}}, "settings must be an object of TrainingSettings or a subclass, got {'epochs"),
        ({"settings": TrainingSettings}, "settings must be an object of TrainingSettings or a subclass, got <class"),
        ({"options": {"nproc": 1}}, r"options must be an object of RunOptions, got {'nproc': 1}"),
        ({"recipe": Sound(TrainingSettings())}, 'recipe must be a name such as "package.module:Name", or the class'),
        ({"output": "s3://bucket/out"}, "output must be a folder of this machine, got s3://bucket/out: copy"),
    ],
)
def test_arguments_of_other_types_are_refused_before_anything_is_written(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    arguments: Any = {"recipe": Sound, "settings": TrainingSettings(), "options": RunOptions(), **given}
    with pytest.raises(InputError, match=f"^{words}"):
        train(**arguments)
    assert not list(tmp_path.iterdir())


def test_the_training_of_a_task_is_refused_outside_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    training = RecipeTraining("tests.engine.probe_recipes:Sound")
    with pytest.raises(TaskError, match=r"^run\(\) must be called in a task.*: call the task, or flyte_ddp.train"):
        training.run(TrainingSettings(), RunOptions())
