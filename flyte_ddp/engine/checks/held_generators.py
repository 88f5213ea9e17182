"""The random number generators that a Dataset, or a transform in it, holds for itself.

Reading a few samples twice does not show a generator whose draws happen to leave these samples as they are, and a
message can name the call that seeds a generator only if the generator is found.
"""

import pickle
import random
from collections import deque
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

SEED = "torch.randint(2**31, ()).item()"
SEEDING = ("set_random_seed", "set_random_state")  # methods of albumentations and MONAI that seed all inner transforms
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
MOST = 1000  # the number of objects to look at
MOST_ITEMS = 50  # the items of a container to look at: a list of a million paths has no generators after the first ones


def find_held_generators(dataset: Any) -> dict[str, bytes]:
    """Find the random generators of NumPy, Python and torch that a Dataset holds in its attributes, at any depth.

    Args:
        dataset: the Dataset. At most MOST objects are searched, the nearest first; of each dict, list and tuple, the
            first MOST_ITEMS items.

    Returns:
        The state of each generator as bytes, by the code that seeds the generator, such as self.rng.manual_seed(...).
        The nearest generators come first. If an object seeds all generators inside it by a method, they are one entry
        with a call of the method, such as self.transform.set_random_seed(...).
    """
    states: dict[str, bytes] = {}
    ahead = deque([("self", dataset, "")])
    seen = set[int]()
    while ahead and len(seen) < MOST:
        name, value, owner = ahead.popleft()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, torch.Tensor, np.ndarray, str)):
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            call, state = _call_and_state(name, value)
            states[owner or call] = states.get(owner or call, b"") + state
            continue
        if not owner:
            owner = next((f"{name}.{method}({SEED})" for method in SEEDING if hasattr(value, method)), "")
        ahead.extend((name + step, child, owner) for step, child in _children(value))
    return states


def _call_and_state(name: str, generator: Any) -> tuple[str, bytes]:
    """Return the code that seeds a generator, for a message, and the generator's state as bytes.

    A random.SystemRandom has no state and cannot be seeded. Its state is b"", and its code puts a random.Random in its
    place.

    Args:
        name: the generator as code, such as self.rng.
        generator: a Generator or RandomState of NumPy, a Generator of torch, or a random.Random.
    """
    if isinstance(generator, np.random.Generator):
        return f"{name} = numpy.random.default_rng({SEED})", pickle.dumps(generator.bit_generator.state)
    if isinstance(generator, torch.Generator):
        return f"{name}.manual_seed({SEED})", generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return f"{name}.seed({SEED})", pickle.dumps(generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return f"{name} = random.Random({SEED})", b""
    return f"{name}.seed({SEED})", pickle.dumps(generator.getstate())


def _children(parent: Any) -> list[tuple[str, Any]]:
    """Return the items of a container, or the attributes of an object, each with the code that leads there: .name."""
    if isinstance(parent, dict):
        return [(f"[{key!r}]", value) for key, value in islice(parent.items(), MOST_ITEMS)]
    if isinstance(parent, (list, tuple)):
        return [(f"[{number}]", item) for number, item in enumerate(parent[:MOST_ITEMS])]
    return [(f".{name}", value) for name, value in getattr(parent, "__dict__", {}).items()]
