"""The built-in datasets, by name."""

from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.data import datasets
from flyte_ddp.errors import DownloadError
from flyte_ddp.report.console import download_progress, say


def resolve_name(platform: Platform, asked: str, auto: str = "mnist") -> str:
    """The dataset that a name or auto stands for; a local run may need a stand-in, and discards damaged data."""
    name = auto if asked == "auto" else asked
    if not platform.is_local():
        return name
    datasets.discard_damaged(name)
    if asked == "auto" and not is_available(platform, name):
        name = "digits"
        datasets.discard_damaged(name)
    return name


def is_available(platform: Platform, name: str) -> bool:
    """Whether a dataset is prepared, or can be prepared now; if not, prints why."""
    if datasets.prepared_dir(name).exists():
        return True
    try:
        prepare(platform, name)
    except DownloadError as error:
        say(f"{name} cannot be downloaded here: this run trains on digits, scikit-learn's 1,797 images.\n{error}")
        return False
    return True


def prepare(platform: Platform, name: str) -> Path:
    """The folder of the dataset (for its format see flyte_ddp.data.prepared), downloaded where it must be."""
    with download_progress() as progress:
        return datasets.prepare(name, progress, platform.open_file)
