"""What a recipe says by its former name."""

import pytest

from flyte_ddp import Recipe, TrainingSettings
from flyte_ddp.recipe import RENAMED


class Mixin:
    couples_samples = True


def former() -> type[Recipe]:
    class Former(Mixin, Recipe):
        recompute, shard = ("blocks.*",), ("blocks.*",)

        def __init__(self, settings):
            super().__init__(settings)
            self.norm_samples = 8

        def factor(self, step, steps):
            return step / steps

    return Former


def test_former_names_have_their_effect_with_a_warning_that_has_the_new_one():
    with pytest.warns(FutureWarning) as warned:
        recipe = former()(TrainingSettings())
    assert (recipe.uses_global_batch, recipe.ghost_batch_size, recipe.lr_lambda(1, 4)) == (True, 8, 0.25)
    assert recipe.activation_checkpointing == recipe.fsdp_units == ("blocks.*",)
    with pytest.warns(FutureWarning, match=r"Former\.everyone is called all_gather now: rename it"):
        assert recipe.everyone == recipe.all_gather
    told = {str(each.message) for each in warned}
    assert told == {f"Former.{name} is called {RENAMED[name]} now: rename it" for name in RENAMED if name != "everyone"}
    assert {each.filename for each in warned} == {__file__}, "it shows the line to be changed"


def test_a_recipe_with_new_names_derives_from_one_with_former_names():
    with pytest.warns(FutureWarning):
        kind = former()

    class New(kind):  # type: ignore[misc, valid-type]
        ghost_batch_size, fsdp_units = 4, ("heads.*",)

        def __init__(self, settings):
            Recipe.__init__(self, settings)

    recipe = New(TrainingSettings())
    assert (recipe.ghost_batch_size, recipe.fsdp_units, recipe.lr_lambda(1, 4)) == (4, ("heads.*",), 0.25)
    assert not hasattr(recipe, "nothing")
