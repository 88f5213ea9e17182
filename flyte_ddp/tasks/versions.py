"""Cache versions that follow the code: a result is reused only as long as what determined it is unchanged."""

import os
from typing import Dict, Sequence

from flytekit.core.cache import CachePolicy, VersionParameters

from flyte_ddp.code_version import OTHER_CODE, code_version
from flyte_ddp.errors import ReportedError

# tasks/summaries.py and train.py, because a cached result must have the outputs declared there
ENGINE_SOURCES = (
    "flyte_ddp/engine/arithmetic.py",
    "flyte_ddp/engine/average.py",
    "flyte_ddp/engine/batches.py",
    "flyte_ddp/engine/choice.py",
    "flyte_ddp/engine/by_row.py",
    "flyte_ddp/engine/loading.py",
    "flyte_ddp/engine/loop.py",
    "flyte_ddp/engine/measures.py",
    "flyte_ddp/engine/results.py",
    "flyte_ddp/engine/set_up.py",
    "flyte_ddp/engine/state.py",
    "flyte_ddp/engine/torch_compat.py",
    "flyte_ddp/engine/warm_start.py",
    "flyte_ddp/engine/watch.py",
    "flyte_ddp/engine/worker.py",
    "flyte_ddp/recipe.py",
    "flyte_ddp/recipes/classifier.py",
    "flyte_ddp/schedules.py",
    "flyte_ddp/share.py",
    "flyte_ddp/tasks/summaries.py",
    "flyte_ddp/tasks/train.py",
    "flyte_ddp/weights.py",
)
NETWORK_SOURCES = (
    "flyte_ddp/recipes/images.py",
    "flyte_ddp/data/image_files.py",
    "flyte_ddp/recipes/models.py",
)
TRAINING_SOURCES = (*ENGINE_SOURCES, *NETWORK_SOURCES)
DATA_SOURCES = (
    "flyte_ddp/data/datasets.py",
    "flyte_ddp/data/description.py",
    "flyte_ddp/data/prepared.py",
    "flyte_ddp/data/writer.py",
)
CODE_VARIABLE = "DDP_TRAINING_CODE"


class CodeVersion(CachePolicy):
    """The cache version of a task whose result depends on these files and distributions."""

    def __init__(self, sources: Sequence[str], distributions: Sequence[str]):
        self.sources, self.distributions = sources, distributions

    def get_version(self, salt: str, params: VersionParameters) -> str:
        return salt + self.version

    @property
    def version(self) -> str:
        return code_version(self.sources, self.distributions)

    @property
    def environment(self) -> Dict[str, str]:
        """A variable for the task's pods, with the files and their hash, which check_registered_code reads there."""
        return {CODE_VARIABLE: " ".join([code_version(self.sources, ()), *self.sources])}


def check_registered_code() -> None:
    """Raises ReportedError if this pod's code is not what was registered: with --copy none it has the code of its
    image, and the result would be cached as that of the registered code."""
    registered, *sources = os.environ.get(CODE_VARIABLE, "").split() or [""]
    if registered and code_version(sources, ()) != registered:
        raise ReportedError(f"this pod's training code is not the code that was registered: {OTHER_CODE}")
