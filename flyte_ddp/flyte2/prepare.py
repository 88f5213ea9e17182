"""The way from a dataset's name to the prepared dataset, within tasks of Flyte 2."""

from typing import Any

import flyte
from flyte.io import Dir, File

from flyte_ddp.attempt import datasets
from flyte_ddp.attempt.platform_training import check_classifier
from flyte_ddp.code.code_version import code_version
from flyte_ddp.data.prepared import prepared
from flyte_ddp.errors import InputError
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.flyte2.data import downloaded, output_folder
from flyte_ddp.flyte2.environment import PAUSES, cached
from flyte_ddp.model_files.model_metadata import read_required_metadata
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions


def resolve_dataset(hp: Hyperparameters, options: RunOptions, auto: str = "mnist") -> str:
    """Check that the training is possible, and return the name of the dataset to train on.

    A local run also checks this machine, and deletes the prepared dataset if that is damaged.

    Args:
        hp: the settings of the training.
        options: the options of the run.
        auto: the dataset that hp.dataset "auto" stands for.

    Returns:
        hp.dataset, or `auto` if that is "auto". A local run prepares the dataset for "auto"; if the download fails, the
        name is "digits".

    Raises:
        FinalError: keep_best or patience is set without a validation split. In a local run also: this machine cannot
            run the ranks, or there are too many ranks for a batch.
    """
    with one_attempt():
        datasets.check_ranks(platform, hp, options)
        return datasets.resolve_name(platform, hp.dataset, auto)


def resolve_for_multinode(hp: Hyperparameters, auto: str = "mnist") -> str:
    """Return the name of the dataset to train on, on many nodes: hp.dataset, or `auto` if that is "auto".

    Args:
        hp: the settings of the training, with the dataset's name or "auto".
        auto: the dataset that "auto" stands for.

    Raises:
        FinalError: This is a local run, or batch_size or virtual_ranks does not suit the largest registered number of
            ranks.
    """
    with one_attempt():
        datasets.check_nodes(platform, hp)
        return datasets.resolve_name(platform, hp.dataset, auto)


def classifier_settings(model_state: File) -> Hyperparameters:
    """Download a built-in classifier's weights, and return the settings of its training, with the name of its dataset.

    Args:
        model_state: the file of weights.

    Raises:
        FinalError: The file has no metadata, or the weights are not those of a built-in classifier on a built-in
            dataset. In a local run also: the download fails.
        AttemptError: On a cluster, the download fails, which Flyte retries.
    """
    with one_attempt():
        path = downloaded(model_state)
        assert path
        known = read_required_metadata(path, "give the model_state of a training")
        check_classifier(known, model_state.path)
        return Hyperparameters.from_dict({**known.settings, "dataset": known.data["name"]})


def shard_numbers(shards: int) -> range:
    """Return the numbers of so many shards, from 0, for a map over a prediction. Raises FinalError for less than 1."""
    with one_attempt():
        if shards < 1:
            raise InputError(f"shards must be at least 1, got {shards}: that many parts are predicted, each on its own")
        return range(shards)


def preparation_arguments() -> dict[str, Any]:
    """Return the arguments of a task that prepares a dataset: cache and retries."""
    code = code_version("flyte_ddp.data.sources.datasets")
    return {"cache": cached(code), "retries": flyte.RetryStrategy(3, PAUSES)}


def prepare_dataset(name: str) -> Dir:
    """Download and prepare the named dataset. Its content is its key in the caches of tasks that use it."""
    with one_attempt():
        folder = datasets.prepare(platform, name)
        return output_folder(folder, digest=prepared.read_description(folder).digest)
