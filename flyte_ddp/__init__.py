"""The library's face: every name that users import, as in `from flyte_ddp import Recipe`.

A name's module is imported when somebody asks for the name. So a workflow file imports no torch, and a rank no
flytekit. __init__.pyi gives type checkers the same names.
"""

import sys
from importlib import import_module
from typing import Any

if sys.platform == "win32":
    raise ImportError("flyte_ddp needs Linux or macOS, got Windows: install it in WSL, which is Linux")

# pyproject.toml reads the version from this line, because pods and checkouts have the code but no installed package
__version__ = "0.1.0"

MODULES = {
    "BlockFolder": "flyte_ddp.data.blocks.block_folder",
    "Blocks": "flyte_ddp.data.blocks.blocks",
    "Classifier": "flyte_ddp.recipes.classifier",
    "Hyperparameters": "flyte_ddp.recipes.hyperparameters",
    "LightningOptions": "flyte_ddp.lightning.settings",
    "LightningSettings": "flyte_ddp.lightning.settings",
    "LightningTraining": "flyte_ddp.lightning.task",
    "Loop": "flyte_ddp.engine.own_loop.loop",
    "Measures": "flyte_ddp.recipe",
    "Parquet": "flyte_ddp.data.blocks.parquet",
    "PreparedDataset": "flyte_ddp.flyte1.prepare",
    "Random": "flyte_ddp.recipe",
    "Recipe": "flyte_ddp.recipe",
    "RecipeOutputs": "flyte_ddp.flyte1.recipe",
    "RecipeSummary": "flyte_ddp.attempt.summaries",
    "RecipeTraining": "flyte_ddp.flyte1.recipe",
    "RunOptions": "flyte_ddp.settings",
    "ScriptOutputs": "flyte_ddp.script.task",
    "ScriptTraining": "flyte_ddp.script.task",
    "TarImages": "flyte_ddp.data.blocks.tar",
    "TrainingSettings": "flyte_ddp.settings",
    "file_by_content": "flyte_ddp.flyte1.data",
    "folder_by_content": "flyte_ddp.flyte1.data",
    "weights_by_content": "flyte_ddp.flyte1.data",
    "index_tars": "flyte_ddp.data.blocks.tar",
    "load_model": "flyte_ddp.recipes.models",
    "new_folder": "flyte_ddp.flyte1.data",
    "prepare_dataset": "flyte_ddp.flyte1.prepare",
    "read_metadata": "flyte_ddp.model_files.model_metadata",
    "setting": "flyte_ddp.fields",
    "stream": "flyte_ddp.flyte1.data",
    "train": "flyte_ddp.training",
    "write_blocks": "flyte_ddp.data.blocks.block_folder",
}
__all__ = ["__version__", *MODULES]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> "list[str]":
    return sorted({*globals(), *MODULES})
