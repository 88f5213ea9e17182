"""The place of a recipe's method in its source, for messages."""

import inspect
from typing import Any

from flyte_ddp.recipe import Recipe


def code_location(recipe: Any, method: str) -> str:
    """Return a method's name and place in the user's code, for messages: 'Name.method (file, line n)'.

    The place is left out if the method has no Python code. If the recipe does not override forward(), the text for
    "forward" is 'the network of Name.model (file, line n)'.

    Args:
        recipe: the recipe or its class.
        method: the name of the method.
    """
    kind = recipe if isinstance(recipe, type) else type(recipe)
    function = inspect.unwrap(getattr(kind, method))
    if method == "forward" and function is Recipe.forward:  # which calls the network, and that is the user's
        return f"the network of {code_location(recipe, 'model')}"
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
    return f"{kind.__name__}.{method}{where}"
