"""Cache versions that follow the code: a result is reused only as long as what determined it is unchanged."""

import os
from typing import Sequence

from flytekit.core.cache import CachePolicy, VersionParameters

from workflows.training.code_version import OTHER_CODE, code_version
from workflows.training.errors import ReportedError

# tasks/train.py because a cached result must have the outputs that are declared there
TRAINING_SOURCES = (
    "tasks/train.py",
    "training/batches.py",
    "training/image_files.py",
    "training/layers.py",
    "training/loading.py",
    "training/loop.py",
    "training/models.py",
    "training/state.py",
    "training/watch.py",
    "training/worker.py",
)
INFERENCE_SOURCES = (
    "tasks/inference.py",
    "training/batches.py",
    "training/image_files.py",
    "training/images.py",
    "training/inference.py",
    "training/layers.py",
    "training/models.py",
)
TIMING_SOURCES = ("training/timing.py",)
AUTOENCODER_SOURCES = (
    "tasks/autoencoder.py",
    "training/autoencoder.py",
    "training/batches.py",
    "training/held_out.py",
    "training/lightning_checkpoint.py",
    "training/lightning_rank.py",
    "training/watch.py",
)
KERAS_SOURCES = ("training/mirrored.py", "training/mirrored_checkpoint.py")
DATA_SOURCES = ("training/datasets.py", "training/description.py", "training/prepared.py")
CODE_VARIABLE = "DDP_TRAINING_CODE"


def registered_code() -> str:
    """What the code of the ranks is at registration; goes into the pod's environment."""
    return code_version(sorted({*TRAINING_SOURCES, *INFERENCE_SOURCES, *TIMING_SOURCES, *AUTOENCODER_SOURCES}), ())


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
