"""Rows on the examples: each is accepted by the probe and trains, on one rank."""

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_rows.row import Machine, Missing, Row, expect
from benchmarks.gpu_rows.training import train

# Recipe, settings, and what it needs besides torch and numpy
EXAMPLES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "charlm": ("CharLM", {"characters": 20_000}, ()),
    "tabular": ("Tabular", {"batch_size": 20}, ("sklearn",)),
    "segmentation": ("Segmentation", {"images": 120}, ("sklearn",)),
    "contrastive": ("Contrastive", {"batch_size": 400}, ("sklearn",)),
}


def example(name: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        recipe, settings, needed = EXAMPLES[name]
        for package in needed:
            if importlib.util.find_spec(package) is None:
                raise Missing(f"{package} is not installed")
        kind = importlib.import_module(f"examples.{name}.settings").Settings
        world = machine.world(1, "nccl" if machine.gpus else "gloo")
        result = train(f"examples.{name}.recipe:{recipe}", kind(epochs=1, **settings), world)[0]
        expect(all(map(math.isfinite, result.tested.values())), f"{result.tested}")
        return f"{result.precision}, {', '.join(f'{key} {value:.4g}' for key, value in result.tested.items())}"

    return check


ROWS = [Row(f"examples/{name}", example(name), is_quick=False) for name in EXAMPLES]
