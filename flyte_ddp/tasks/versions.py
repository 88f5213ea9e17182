"""Cache versions that follow the code: a result is reused only as long as what determined it is unchanged."""

import os
from typing import Sequence

from flytekit.core.cache import CachePolicy, VersionParameters

from flyte_ddp.code_version import OTHER_CODE, code_version
from flyte_ddp.errors import ReportedError

# tasks/train.py because a cached result must have the outputs that are declared there
ENGINE_SOURCES = (
    "flyte_ddp/recipe.py",
    "flyte_ddp/recipes/classifier.py",
    "flyte_ddp/schedules.py",
    "flyte_ddp/tasks/train.py",
    "flyte_ddp/engine/batches.py",
    "flyte_ddp/engine/layers.py",
    "flyte_ddp/engine/loading.py",
    "flyte_ddp/engine/loop.py",
    "flyte_ddp/engine/measures.py",
    "flyte_ddp/engine/state.py",
    "flyte_ddp/engine/watch.py",
    "flyte_ddp/engine/worker.py",
)
NETWORK_SOURCES = (
    "flyte_ddp/recipes/images.py",
    "flyte_ddp/data/image_files.py",
    "flyte_ddp/recipes/models.py",
)
TRAINING_SOURCES = (*ENGINE_SOURCES, *NETWORK_SOURCES)
RECIPE_SOURCES = (*ENGINE_SOURCES, "flyte_ddp/tasks/recipe.py", "flyte_ddp/engine/predict.py")
INFERENCE_SOURCES = (
    *NETWORK_SOURCES,
    "flyte_ddp/inference/task.py",
    "flyte_ddp/engine/batches.py",
    "flyte_ddp/inference/images.py",
    "flyte_ddp/inference/rank.py",
)
TIMING_SOURCES = ("flyte_ddp/timing/rank.py",)
AUTOENCODER_SOURCES = (
    "flyte_ddp/autoencoder/task.py",
    "flyte_ddp/autoencoder/network.py",
    "flyte_ddp/engine/batches.py",
    "flyte_ddp/data/held_out.py",
    "flyte_ddp/autoencoder/checkpoint.py",
    "flyte_ddp/autoencoder/rank.py",
    "flyte_ddp/engine/watch.py",
)
KERAS_SOURCES = ("flyte_ddp/keras/rank.py", "flyte_ddp/keras/checkpoint.py")
DATA_SOURCES = ("flyte_ddp/data/datasets.py", "flyte_ddp/data/description.py", "flyte_ddp/data/prepared.py")
CODE_VARIABLE = "DDP_TRAINING_CODE"


def registered_code() -> str:
    """What the code of the ranks is at registration; goes into the pod's environment."""
    return code_version(
        sorted({*TRAINING_SOURCES, *RECIPE_SOURCES, *INFERENCE_SOURCES, *TIMING_SOURCES, *AUTOENCODER_SOURCES}), ()
    )


def check_registered_code() -> None:
    """Raises where this pod would train with other code than was registered, and the result be cached as that code's:
    with --copy none it has the code of its image."""
    if os.environ.get(CODE_VARIABLE, registered_code()) != registered_code():
        raise ReportedError(f"this pod's training code is not the code that was registered: {OTHER_CODE}")


class CodeVersion(CachePolicy):
    """The cache version of a task whose result these files and distributions decide."""

    def __init__(self, sources: Sequence[str], distributions: Sequence[str]):
        self.sources, self.distributions = sources, distributions

    def get_version(self, salt: str, params: VersionParameters) -> str:
        return salt + code_version(self.sources, self.distributions)
