"""Batch prediction as Flyte tasks: check the inputs, split the images into shards, predict each shard."""

import hashlib
import json
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Cache, task
from flytekit.configuration import LocalConfig
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import CSVFile, FlyteFile, PythonPickledFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import runs_dir
from flyte_ddp.attempt.pod import check_code, check_gpus
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.requested import training_environment
from flyte_ddp.code.code_version import code_version
from flyte_ddp.data.prepared import prepared
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.flyte1.inputs import check_dataset, choose_dataset, classifier_metadata
from flyte_ddp.flyte1.outputs import output_file
from flyte_ddp.flyte1.platform import is_local, working_folder
from flyte_ddp.flyte1.prepare import PreparedDataset
from flyte_ddp.flyte1.resources import preparation_resources, small_resources, training_resources, training_sizes
from flyte_ddp.inference.gather import Listing
from flyte_ddp.inference.shards import InferenceOptions, Shard, ShardJob
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.launch.launcher import run_alone
from flyte_ddp.report.console import Console, say
from flyte_ddp.whole_files import content_digest, remove_leftovers, replacing, writing_to

PREDICTOR = "flyte_ddp.inference.rank:predict_images"
INSPECTOR = "flyte_ddp.inference.rank:check_model"
INFERENCE_CODE = CodeVersion(code_version("flyte_ddp.inference.rank", __name__), ("torch", "pillow"))


def shard_arguments() -> dict[str, Any]:
    """Return the keyword arguments of @task for predicting a shard, without cache and retries.

    The pod is like a training's, with at most one GPU and without secrets. Raises InputError if a DDP_ environment
    variable is invalid.
    """
    gpus = min(1, registration().training_gpus)
    return {
        **training_resources(INFERENCE_CODE),
        **training_sizes(gpus),
        "environment": training_environment(gpus, INFERENCE_CODE.code),
        "secret_requests": None,
    }


class Checked(NamedTuple):
    """The name of the dataset that the model was trained on, and options with the name of the model's network."""

    dataset: str
    options: InferenceOptions


@task(**small_resources())
@platform_errors(platform)
def resolve_inputs(
    model_state: PythonPickledFile | None, folder: FlyteDirectory | None, options: InferenceOptions
) -> Checked:
    """Check the inputs of a batch prediction, and find out which dataset and network "auto" stands for; a Flyte task.

    "auto" stands for the dataset or network in the metadata of the weights. Without weights or metadata, it stands for
    mnist and "mnist_cnn". A network that the options name is not compared with the metadata here.

    A local run also deletes a damaged copy of the dataset, and cache entries whose files are gone. If "auto" stands for
    mnist because there are no metadata, a local run downloads mnist, and takes digits if the download fails.

    Args:
        model_state: the weights; None if the workflow trains a model first.
        folder: the images to predict; None for a split of the dataset.
        options: the options, of which dataset and model may be "auto".

    Returns:
        The name of the dataset, and the options with the name of the network as `model`. `dataset` of these options
        may still be "auto".

    Raises:
        InputError: The folder has no files. The weights are not those of a built-in classifier on a built-in dataset,
            or were trained on another dataset than the options name. In a local run, the file of the weights or the
            dataset does not exist.
    """
    known = classifier_metadata(model_state)
    Listing.of(folder)  # refuses a folder without files
    dataset = choose_dataset(known, options.dataset, "load it with flyte_ddp.load_model")
    check_dataset(known, options.dataset)
    if options.model == "auto":
        options = replace(options, model=known.facts["network"] if known else "mnist_cnn")
    return Checked(dataset, options)


class Plan(NamedTuple):
    """The shards, and the listing of the folder that their keys were made of."""

    shards: list[Shard]
    listing: FlyteFile


@task(retries=2, **preparation_resources() | {"environment": training_environment(0, INFERENCE_CODE.code)})
@platform_errors(platform)
def plan_shards(
    model_state: PythonPickledFile, data: PreparedDataset, folder: FlyteDirectory | None, options: InferenceOptions
) -> Plan:
    """Check the weights, and split the images into at most options.shards shards of nearly equal size; a Flyte task.

    The task is never cached, because images may have changed. Each shard has a key, by which later runs find its
    results: a hash of its images' names, sizes and times, the weights, the network, the dataset and the code.

    Args:
        model_state: the weights.
        data: the prepared dataset that the model was trained on.
        folder: the images; None for those of options.split of `data`.
        options: the options. options.model must be a network's name here, not "auto".

    Returns:
        The shards, and a file that lists the folder's files; the list is empty without a folder.

    Raises:
        InputError: The weights do not fit the network, or the folder has no files.
        ReportedError: The prepared dataset is damaged (DataError), this pod's code is not what was registered, or the
            process that checks the weights has failed (RankError).
    """
    check_code(INFERENCE_CODE.code)
    description = prepared.verify(data.download())
    weights = Path(model_state.download())
    run_alone(INSPECTOR, (str(weights), options.model, data.download()), options.timeout_seconds, Console())
    listing = Listing.of(folder)
    decisive = {
        "weights": content_digest(weights),
        "model": options.model,
        "dataset": description.digest,
        "split": options.split,
        "code": INFERENCE_CODE.version,
    }
    images = len(listing.files) or {"train": description.train_samples, "test": description.test_samples}[options.split]
    count = min(options.shards, images)
    bounds = [images * number // count for number in range(count + 1)]
    shards = [
        Shard(number, count, first, last, _key(**decisive, images=[first, last], files=listing.files[first:last]))
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    return Plan(shards, output_file(listing.write(working_folder() / "listing.json")))


def _key(**decisive: Any) -> str:
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


@task(
    # A shard's key stands for all other inputs
    cache=Cache(policies=INFERENCE_CODE, ignored_inputs=("model_state", "data", "folder", "listing", "options")),
    retries=3,
    **shard_arguments(),
)
@platform_errors(platform)
def predict_shard(
    shard: Shard,
    model_state: PythonPickledFile,
    data: PreparedDataset,
    folder: FlyteDirectory | None,
    listing: FlyteFile,
    options: InferenceOptions,
) -> CSVFile:
    """Predict the images of one shard, and return a CSV file with a row for each image; a Flyte task.

    On a cluster, Flyte caches each shard by its key. A local run keeps the file on this machine. The next local run
    with the same shard returns that file, unless the cache is turned off or overwritten.

    Args:
        shard: the shard, whose key stands for all other inputs in the cache.
        model_state: the weights.
        data: the prepared dataset that the model was trained on.
        folder: the images; None for those of options.split of `data`.
        listing: the list of the folder's files.
        options: the options of the prediction.

    Raises:
        InputError: A score is not finite, images or weights cannot be used, or the file cannot be written.
        ReportedError: An image file has changed since it was listed, this pod's code is not what was registered, or the
            process that predicts has failed (RankError). If this pod has another number of GPUs than registered, the
            error is a RecoverableError.
    """
    part = part_path(shard)
    settings = LocalConfig.auto()
    if part.exists() and settings.cache_enabled and not settings.cache_overwrite:
        say(f"{shard.name}: already predicted")
        return output_file(part, CSVFile)
    check_code(INFERENCE_CODE.code)
    check_gpus()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ddp-") as copies:
        planned = Listing.read(Path(listing.download())).part(shard)
        files = planned.fetch(folder, Path(copies))
        with replacing(part) as beside:
            job = ShardJob(shard, options, model_state.download(), data.download(), files, str(beside))
            run_alone(PREDICTOR, job, options.timeout_seconds, Console(), choose_world("auto", 1, 1))
            planned.verify(folder)  # after the files were read, so that no change is missed
    say(f"{shard.name}: {shard.last - shard.first:,} images in {time.perf_counter() - started:.1f} s")
    return output_file(part, CSVFile)


def part_path(shard: Shard) -> Path:
    """Return the path of the CSV file for a shard's rows.

    On a cluster the file is in the task's working folder. In a local run it is named by the shard's key, in a folder
    that all runs share, so an earlier run may have finished it. A local call creates this folder, and removes
    unfinished files in it that nobody has changed for an hour.

    Raises:
        InputError: a local run cannot write to its folder.
    """
    if not is_local():
        return working_folder() / "part.csv"
    folder = runs_dir() / "shards"
    with writing_to(runs_dir(), "DDP_RUNS_DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    return folder / f"{shard.key}.csv"
