import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A home and runs of the tests' own, before flytekit is imported: its local cache is in the home folder."""
    folder = config.stash[FOLDER] = tempfile.TemporaryDirectory(prefix="mirrored-", ignore_cleanup_errors=True)
    os.environ.update(HOME=folder.name, DDP_RUNS_DIR=folder.name, CUDA_VISIBLE_DEVICES="-1")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[FOLDER].cleanup()


FOLDER = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
