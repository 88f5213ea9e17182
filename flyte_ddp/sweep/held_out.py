"""Holding out a validation split, as a Flyte task."""

from pathlib import Path

from flytekit import Cache, task

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.code_version import code_version
from flyte_ddp.data import prepared
from flyte_ddp.data.datasets import data_dir
from flyte_ddp.data.held_out import hold_out
from flyte_ddp.tasks import platform
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.outputs import output_folder
from flyte_ddp.tasks.prepare import PreparedDataset
from flyte_ddp.tasks.resources import preparation_resources


@task(
    cache=Cache(policies=CodeVersion(code_version("flyte_ddp.data.held_out"), ()), serialize=True),
    retries=3,
    **preparation_resources(),
)
@platform_errors(platform)
def hold_out_validation(data: PreparedDataset) -> PreparedDataset:
    """The training images of a prepared dataset as a dataset of their own, see flyte_ddp.data.held_out."""
    original = Path(data.download())
    folder = data_dir() / "prepared" / f"{prepared.verify(original).name}-held-out"
    hold_out(original, folder)
    return output_folder(folder)
