"""Rows on the examples: each is accepted by the probe and trains, on one rank."""

import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_rows.row import Machine, Missing, Row, expect
from benchmarks.gpu_rows.training import train

# Recipe, settings, and what it needs besides torch and numpy
EXAMPLES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "charlm": ("CharLM", {"characters": 20_000}, ()),
    "stream": ("Stream", {"batch_size": 150}, ()),
    "tabular": ("Tabular", {"batch_size": 20}, ("sklearn",)),
    "segmentation": ("Segmentation", {"images": 120}, ("sklearn",)),
    "contrastive": ("Contrastive", {"batch_size": 400}, ("sklearn",)),
    "resnet": ("ResNet", {"batch_size": 20, "side": 64}, ("torchvision", "PIL")),
}


def example(name: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        recipe, settings, needed = EXAMPLES[name]
        for package in needed:
            if importlib.util.find_spec(package) is None:
                raise Missing(f"{package} is not installed")
        kind = importlib.import_module(f"examples.{name}.settings").Settings
        world, data = machine.world(1, "nccl" if machine.gpus else "gloo"), data_of(name, machine.place)
        result = train(
            f"examples.{name}.recipe:{recipe}", kind(epochs=1, **settings), world, "", loader_workers=2, source=data
        )[0]
        expect(all(map(math.isfinite, result.tested.values())), f"{result.tested}")
        return f"{result.precision}, {', '.join(f'{key} {value:.4g}' for key, value in result.tested.items())}"

    return check


def data_of(name: str, place: Path) -> str:
    """What the example is trained on, made up; empty if it has its own."""
    folder = place / f"data-of-{name}"
    if name == "stream":
        from examples.stream.waves import waves
        from flyte_ddp.data.blocks.block_folder import write_blocks

        for split, seed in (("train", 0), ("test", 1)):
            write_blocks(folder / split, waves(1, seed), 100)
        return str(folder)
    if name == "resnet":
        from PIL import Image

        random = np.random.default_rng(0)
        for label in range(2):
            (folder / str(label)).mkdir(parents=True)
            for number in range(50):
                pixels = random.integers(0, 128, (64, 64, 3), dtype=np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
        return str(folder)
    return ""


ROWS = [Row(f"examples/{name}", example(name), is_quick=name == "stream") for name in EXAMPLES]
