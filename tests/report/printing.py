"""A worker that prints and warns."""

import warnings
from typing import Any

from flyte_ddp.launch.environment import Environment


def run(environment: Environment, *_: Any) -> None:
    print(f"printed by {environment.rank}\nin two", end=" ")
    print("lines")
    warnings.warn("mind this", stacklevel=1)
