from flyte_ddp.engine.measures import find_headline
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings


def test_the_headline_is_the_first_measure_that_judges_the_network():
    recipe = Recipe(TrainingSettings())
    assert find_headline(recipe, {"loss": 1.0, "tokens": 100.0, "accuracy": 0.5}) == "accuracy"
    assert find_headline(recipe, {"loss": 1.0, "tokens": 100.0}) == "loss"
