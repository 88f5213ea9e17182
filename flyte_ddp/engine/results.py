"""The results of a training: weights, predictions and pictures in files."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.checkpoints.checkpoint import finish_draft, write_draft
from flyte_ddp.engine.digest import weights_digest
from flyte_ddp.engine.evaluations import Evaluated, gather_rows
from flyte_ddp.engine.hosts.places import hardware
from flyte_ddp.engine.job import FINAL, LAST, PICTURES, PREDICTIONS, Job
from flyte_ddp.engine.set_up import SetUp
from flyte_ddp.engine.sharding.sharded_state import Shard, fill, with_room
from flyte_ddp.engine.sharding.sharding import in_own_types, is_sharded
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.model_files.model_metadata import MEASURED_ON, ModelMetadata, add_metadata
from flyte_ddp.model_files.weights import first_names, save
from flyte_ddp.recipe import CPU, Recipe
from flyte_ddp.whole_files import whole_file, writing_to

MOST_PICTURES = 24


def remove_earlier(job: Job) -> None:
    """Remove what an earlier training may have left in job.logs, and this one may not write again. Raises OSError."""
    logs = Path(job.logs)
    for file in (*(logs / name for name in (PREDICTIONS, PICTURES, LAST, FINAL)), *logs.glob("best-*-epoch-*.pt")):
        file.unlink(missing_ok=True)


def write_last(setup: SetUp, job: Job) -> None:
    """Write the last epoch's weights and the final checkpoint, if they are wanted; a collective.

    Rank 0 calls remove_earlier(), and then writes the files into job.logs. The weights are written if there is a
    validation split, because the training may return another epoch's weights. The checkpoint is written with
    options.keep_checkpoint or settings.stop_after, so that a later training can continue from it. Call this function
    before evaluate_test(), which may load the best epoch's weights.

    Args:
        setup: the training, which is over.
        job: the job.

    Raises:
        InputError: The folder cannot be written to. Rank 0 alone raises it.
    """
    state = setup.state
    with writing_to(job.logs, job.chosen_by):
        if distributed.get_rank() == 0:
            remove_earlier(job)
        if setup.validation:
            write_weights(setup, job, Path(job.logs, LAST), state.progress.history[-1].validation)
        if job.options.keep_checkpoint or job.settings.stop_after:
            path = Path(job.logs, FINAL)
            content = {"identity": job.checkpoint_identity, "state": state.state_dict()}
            if distributed.get_rank():
                fill(None, content, state.device)
            else:
                finish_draft(write_draft(path, content, state.device), path)


def write_results(setup: SetUp, tested: Evaluated, job: Job) -> str:
    """Write a trained network's weights, predictions and pictures, and return the digest of the weights; a collective.

    Rank 0 writes the weights to job.model_path. These are the weights that the training evaluates, which may be the
    moving average. It writes predictions to job.logs if `tested` has some, and pictures if the recipe draws some.

    Args:
        setup: the training.
        tested: the evaluation of these weights on the test split.
        job: the job.

    Returns:
        The digest, the same on all ranks.

    Raises:
        InputError: A file cannot be written. Rank 0 alone raises it.
        Exception: Whatever reading the first test samples, or the recipe's forward() or pictures(), raises.
    """
    path = Path(job.model_path)
    is_first = distributed.get_rank() == 0
    with writing_to(path.parent, job.chosen_by):
        digest = write_weights(setup, job, path, tested.measures, split="test")
    # Outside of the blocks, because an OSError of the recipe's code says nothing about the folder
    drawn = draw_pictures(setup.state, setup.test.split) if is_first or is_sharded(setup.state.model) else []
    with writing_to(job.logs, job.chosen_by):
        if tested.predictions is not None:
            write_predictions(tested.predictions, setup, Path(job.logs, PREDICTIONS))
        if is_first and drawn:
            write_pictures(drawn, Path(job.logs, PICTURES))
    return digest


def write_predictions(predictions: Tensor, setup: SetUp, path: Path) -> None:
    """Write the predictions of all ranks to an .npy file, a row for each test sample in order; a collective.

    Rank 0 writes them batch by batch, so no rank ever has all of them in memory.

    Args:
        predictions: (n, ...), the predictions of this rank's test samples, on the host.
        setup: the training, with its test split.
        path: the file.

    Raises:
        OSError: Rank 0 cannot write the file. Rank 0 alone raises it, after it has received the others' rows.
    """
    test = setup.test
    rows = gather_rows(predictions, setup.test, setup.state.device)
    try:
        if distributed.get_rank() == 0:
            shape = len(test.split), *predictions.shape[1:]
            with whole_file(path) as file:
                written = np.lib.format.open_memmap(file.name, "w+", predictions.numpy().dtype, shape)
                if hasattr(os, "posix_fallocate"):  # a write to the map of a full disk ends the process
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
                for samples, values in rows:
                    written[samples.numpy()] = values.numpy()
                written.flush()
    finally:
        for _ in rows:
            pass


def write_weights(
    setup: SetUp,
    job: Job,
    path: Path,
    measures: dict[str, float],
    weights: Mapping[str, Tensor | Shard] | None = None,
    split: str = "validation",
) -> str:
    """Write weights with their metadata to a file, and return their digest, the same on all ranks; a collective.

    Rank 0 writes the file. The file lacks the weights that model() has frozen: model() provides them when the file is
    loaded.

    Args:
        setup: the training.
        job: the job, for the metadata.
        path: the file.
        measures: the measures of these weights, for the metadata.
        weights: the weights; by default those that the training evaluates, which may be the moving average.
        split: the split that the measures are of.

    Raises:
        OSError: Rank 0 cannot write the file. Rank 0 alone raises it; the other ranks return.
    """
    state = setup.state
    size = distributed.get_world_size()
    weights = weights or state.evaluated_weights()
    digest = weights_digest(weights, state.base.digest, state.device)
    if distributed.get_rank():
        fill(None, weights, state.device)
        return digest
    training = {"world_size": size, "hardware": hardware(state.device), "precision": setup.precision}
    if split != "test":
        training[MEASURED_ON] = split
    metadata = build_metadata(state.recipe, job, setup.probed.headline, measures, training, state.base.digest, digest)
    export_model(weights, path, metadata, state.device)
    return digest


def build_metadata(
    recipe: Recipe,
    job: Job,
    headline: str,
    measures: dict[str, float],
    training: dict[str, Any],
    base_digest: str = "",
    weights_digest: str = "",
) -> ModelMetadata:
    """Return the metadata of a weights file: which training its weights come from.

    Args:
        recipe: the recipe, whose facts() are included.
        job: the job, with settings and data.
        headline: the name of the main measure.
        measures: the measures of the weights, by name.
        training: what the weights were trained on: world_size, hardware and precision.
        base_digest: the digest of the frozen weights that the file leaves out; "" if there are none.
        weights_digest: the digest of the weights.
    """
    settings = job.settings
    return ModelMetadata(
        recipe=job.recipe,
        settings_class=f"{type(settings).__module__}:{type(settings).__qualname__}",
        settings=asdict(settings),
        data={"name": job.dataset, "digest": job.data_digest},
        facts=recipe.facts(),
        headline=headline,
        measures=measures,
        training=training,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        base_digest=base_digest,
        weights_digest=weights_digest,
    )


@torch.no_grad()
def draw_pictures(state: TrainingState, test: Split) -> Sequence[tuple[str, Tensor]]:
    """Let the recipe draw pictures of the first test samples, and return them with their captions.

    The call is a collective if the network is sharded; otherwise one rank calls it alone. recipe.share is set. The
    network that is evaluated is left in evaluation mode.

    Args:
        state: the training.
        test: the test split.

    Returns:
        At most MOST_PICTURES pairs of a caption and a picture; none if the recipe does not define pictures().
    """
    recipe = state.recipe
    count = min(len(test), MOST_PICTURES)
    if getattr(recipe.pictures, "__func__", None) is Recipe.pictures:
        return []
    (tree,) = test.fetch([torch.arange(count)])
    recipe.share = BatchShare(0, count, count, alone=True)
    with in_own_types(state.evaluated):
        outputs: Any | None = recipe.forward(state.evaluated.eval(), tree)
    return [*islice(recipe.pictures(outputs, tree), MOST_PICTURES)]


def write_pictures(drawn: Sequence[tuple[str, Tensor]], path: Path) -> None:
    """Write pictures with their captions to an .npz file for the report.

    The file has an array `captions`, and for each picture an array named by its number, from "0" on.

    Args:
        drawn: captions and pictures, (C, H, W) from 0 to 1. Pictures are written as uint8, from 0 to 255.
        path: the file, which appears whole or not at all.
    """
    images = [picture.detach().cpu().float().clamp(0, 1).mul(255).round().byte().numpy() for _, picture in drawn]
    captions = np.array([caption for caption, _ in drawn])
    arrays: Any = {str(number): image for number, image in enumerate(images)}
    with whole_file(path) as file:
        np.savez(file, captions=captions, **arrays)


def export_model(
    weights: Mapping[str, Tensor | Shard], path: Path, metadata: ModelMetadata | None = None, device: torch.device = CPU
) -> None:
    """Write weights as a plain state_dict of contiguous CPU tensors; the file appears whole or not at all.

    Without sharded weights, one process calls it alone. With sharded weights it is a collective: rank 0 calls it, and
    each other rank calls fill(None, weights, device), which sends its rows. Tied weights are saved once.

    Args:
        weights: the weights by name. A sharded weight is a Shard.
        path: the file.
        metadata: is written into the file; None for no metadata.
        device: the device that sends and receives rows.

    Raises:
        OSError: The file cannot be written. fill() returns on the other ranks nevertheless.
    """
    tensors: dict[str, Tensor] = with_room(weights)
    firsts = first_names(tensors)
    copies = {name: tensors[name].detach().cpu().contiguous() for name in {*firsts.values()}}
    is_whole = not any(isinstance(value, Shard) for value in weights.values())
    written = None
    try:
        with whole_file(path) as file:
            # Tied weights are saved once. Torch's checksums would be wrong where rows are still to be filled in
            save({name: copies[first] for name, first in firsts.items()}, file, checksums=is_whole)
            file.flush()
            written = Path(file.name)
            fill(written, weights, device)
            if metadata:
                add_metadata(file, metadata)
    finally:
        if not written:  # the other ranks wait for it
            fill(None, weights, device)
