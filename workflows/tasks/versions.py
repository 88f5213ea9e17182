"""Cache versions that follow the code: a result is reused only as long as what determined it is unchanged."""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Sequence

from flytekit.core.cache import CachePolicy, VersionParameters

import workflows.training

TRAINING_SOURCES = ("batches.py", "loop.py", "models.py", "state.py", "worker.py")
DATA_SOURCES = ("datasets.py", "prepared.py")


def code_version(sources: Sequence[str], distributions: Sequence[str]) -> str:
    """A hash over files of workflows/training and the installed versions of distributions."""
    digest = hashlib.sha256()
    for name in sources:
        digest.update(Path(workflows.training.__path__[0], name).read_bytes())
    for name in distributions:
        digest.update(f"{name}=={version(name)}".encode())
    return digest.hexdigest()[:16]


class CodeVersion(CachePolicy):
    """The cache version of a task whose result these files and distributions decide."""

    def __init__(self, sources: Sequence[str], distributions: Sequence[str]):
        self.sources, self.distributions = sources, distributions

    def get_version(self, salt: str, params: VersionParameters) -> str:
        return code_version(self.sources, self.distributions)
