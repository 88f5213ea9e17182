"""Places in the user's source, for messages."""

import inspect
import traceback
from typing import Any

import flyte_ddp
from flyte_ddp.code.code_version import is_installed
from flyte_ddp.recipe import Recipe

OURS = f"{flyte_ddp.__path__[0]}/"


def code_location(recipe: Any, method: str) -> str:
    """Return a method's name, file and line, for messages: 'Name.method (file, line n)'.

    File and line are left out if the method has no Python code. If the recipe does not override forward(), the text for
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


def find_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, as "file, line n: ".

    The result is "" if the traceback has only lines of this library and of installed packages.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not (file.startswith((OURS, "<")) or is_installed(file)):
            place = f"{file}, line {line}: "
    return place
