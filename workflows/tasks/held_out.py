"""Holding out a validation split, as a Flyte task."""

from pathlib import Path

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from workflows.tasks.execution import is_local
from workflows.tasks.prepare import PreparedDataset
from workflows.tasks.resources import preparation_resources
from workflows.tasks.versions import DATA_SOURCES, CodeVersion
from workflows.training import prepared
from workflows.training.datasets import data_dir
from workflows.training.held_out import hold_out


@task(
    cache=Cache(policies=CodeVersion((*DATA_SOURCES, "training/held_out.py"), []), serialize=True),
    retries=3,
    **preparation_resources(),
)
def hold_out_validation(data: PreparedDataset) -> PreparedDataset:
    """The training images of a prepared dataset as a dataset of their own, see workflows.training.held_out."""
    original = Path(data.download())
    folder = data_dir() / "prepared" / f"{prepared.verify(original).name}-held-out"
    hold_out(original, folder)
    return FlyteDirectory(str(folder), remote_directory=False if is_local() else None)
