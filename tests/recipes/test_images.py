"""The built-in recipe as the base of a user's own."""

from dataclasses import asdict

import pytest
import torch

from flyte_ddp.errors import InputError
from flyte_ddp.model_files.model_metadata import ModelMetadata, add_metadata
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.recipes.images import ImageClassifier
from flyte_ddp.recipes.models import load_model


class Mine(ImageClassifier):
    pass


def test_weights_of_a_subclass_are_loaded_with_their_data(small_data, tmp_path):
    recipe, path = Mine(Hyperparameters(), small_data), tmp_path / "model.pt"
    weights = recipe.initial_model().state_dict()
    torch.save(weights, path)
    metadata = ModelMetadata(
        recipe=f"{__name__}:Mine", settings_class="flyte_ddp.recipes.hyperparameters:Hyperparameters",
        settings=asdict(recipe.settings), data={"name": "small", "digest": "1"}, facts=recipe.facts(),
        headline="accuracy", measures={}, training={}, versions={},
    )  # fmt: skip
    add_metadata(path, metadata)
    with pytest.raises(InputError, match="makes its network from its data, small: give data_path"):
        load_model(path)
    loaded = load_model(path, data_path=small_data).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
