"""What a plain call refuses before anything is started."""

from dataclasses import dataclass

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings
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
