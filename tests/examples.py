"""The examples in a folder of a user's own, and small trainings of them; made once for all workers."""

import importlib
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from examples.stream.waves import waves
from flyte_ddp.data.blocks.block_folder import write_blocks
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.commands import ROOT
from tests.once import made_once

RECIPES = {
    "charlm": "CharLM",
    "contrastive": "Contrastive",
    "finetune_images": "FinetuneImages",
    "finetune_text": "FinetuneText",
    "resnet": "ResNet",
    "segmentation": "Segmentation",
    "stream": "Stream",
    "tabular": "Tabular",
}
# A few steps, the last one of another size
SMALL: dict[str, dict[str, Any]] = {
    "charlm": {"characters": 12_000, "batch_size": 64, "width": 16, "layers": 1},
    "contrastive": {"batch_size": 400},
    "finetune_images": {"batch_size": 20, "side": 32, "network": "test_convnext", "freeze": "stem, stages"},
    "finetune_text": {"batch_size": 100, "lora_rank": 4},
    # Adam's first steps are of one size, even where a gradient is nothing but rounding: hence small ones
    "resnet": {"batch_size": 20, "side": 32, "learning_rate": 1e-5},
    "segmentation": {"images": 120, "width": 4},
    "stream": {"batch_size": 150},
    "tabular": {"batch_size": 20},
}


class Example(NamedTuple):
    folder: Path
    losses: list[float]  # of each step and of the test
    measures: dict[str, float]  # of the test

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "model.pt", weights_only=True)
        return found


@cache
def project() -> Path:
    """A copy of the examples, which can be imported from now on."""
    ignored = shutil.ignore_patterns("__pycache__", ".venv")
    place = made_once(
        "examples", lambda folder: shutil.copytree(ROOT / "examples", folder, ignore=ignored, dirs_exist_ok=True)
    )
    sys.path.insert(0, str(place))
    return place


def write_images(folder: Path) -> None:
    digits = load_digits()
    for label in (0, 1):
        (folder / str(label)).mkdir()
        for number, image in enumerate(digits.images[digits.target == label][:50]):
            pixels = Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32))
            pixels.save(folder / str(label) / f"{number}.png")


def write_timm_weights(folder: Path) -> None:
    import timm  # it takes seconds, which only one of the examples needs

    torch.manual_seed(0)
    save_file(timm.create_model("test_convnext", num_classes=2).state_dict(), folder / "timm.safetensors")


def write_encoder(folder: Path) -> None:
    """As `python -m finetune_text.encoder FOLDER`, which would import torch and transformers again."""
    project()
    with torch.random.fork_rng([]), patch.object(sys, "argv", ["encoder", str(folder)]):
        runpy.run_module("finetune_text.encoder", run_name="__main__")


def write_waves(folder: Path) -> None:
    for split, seed in (("train", 0), ("test", 1)):
        write_blocks(folder / split, waves(1, seed), 100)


def data_of(name: str) -> str | None:
    """The folder that an example is trained on, if it takes one."""
    writers = {
        "finetune_images": ("images", write_images),
        "resnet": ("images", write_images),
        "stream": ("blocks", write_waves),
    }
    return str(made_once(*writers[name])) if name in writers else None


def init_of(name: str) -> str | None:
    """The folder or file of weights that an example starts from, if it needs one."""
    if name == "finetune_images":
        return str(made_once("timm", write_timm_weights) / "timm.safetensors")
    return str(made_once("encoder", write_encoder)) if name == "finetune_text" else None


def small(name: str) -> dict[str, Any]:
    return {"epochs": 1, "log_interval": 1, "precision": "float32", **SMALL[name]}


def small_settings(name: str, **more: Any) -> Any:
    project()
    return importlib.import_module(f"{name}.settings").Settings(**{**small(name), **more})


def train_small(
    name: str,
    output: Path,
    on_event: Callable[[Event], None],
    nproc: int = 2,
    checkpoint_seconds: float = 0.0,
    sharding: str = "off",
    **more: Any,
) -> Any:
    options = RunOptions(
        nproc=nproc, checkpoint_seconds=checkpoint_seconds, tracking="off", loader_workers=0, sharding=sharding
    )
    settings, recipe = small_settings(name, **more), f"{name}.recipe:{RECIPES[name]}"
    return train(recipe, settings, options, data_of(name), output, on_event=on_event, init=init_of(name))


def trained(name: str, nproc: int) -> Example:
    """An undisturbed training by so many ranks; for reading only."""

    def make(folder: Path) -> None:
        events: list[Event] = []
        measures = train_small(name, folder, events.append, nproc, checkpoint_seconds=60).epochs[-1].test
        losses = [event.measures["loss"] for event in events if isinstance(event, StepLogged)]
        (folder / "said.pickle").write_bytes(pickle.dumps(([*losses, measures["loss"]], dict(measures))))

    folder = made_once(f"example-{name}-{nproc}", make)
    return Example(folder, *pickle.loads((folder / "said.pickle").read_bytes()))
