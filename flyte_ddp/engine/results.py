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
from flyte_ddp.engine.evaluations import Evaluated, gather
from flyte_ddp.engine.hosts.places import hardware
from flyte_ddp.engine.job import FINAL, LAST, PICTURES, PREDICTIONS, Job
from flyte_ddp.engine.set_up import SetUp
from flyte_ddp.engine.sharding.sharded_state import Shard, fill, with_room
from flyte_ddp.engine.sharding.sharding import in_own_types, is_sharded
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.model_files.model_metadata import ModelMetadata, add_metadata
from flyte_ddp.model_files.weights import first_names, save
from flyte_ddp.recipe import CPU, Recipe
from flyte_ddp.whole_files import whole_file, writing_to

MOST_PICTURES = 24


def write_last(setup: SetUp, job: Job) -> None:
    """Write the weights as they are after the last epoch, and the final checkpoint, if they are wanted; a collective.

    Rank 0 writes both into job.logs. The weights are written if there is a validation split, because another epoch's
    weights may be returned as the best. The checkpoint is written with options.keep_checkpoint, or if
    settings.stop_after is set, which ends the training before its last epoch.

    Raises:
        InputError: The folder cannot be written to. Rank 0 alone raises it.
    """
    state = setup.state
    with writing_to(job.logs, job.chosen_by):
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
    """Write a trained network's weights to job.model_path, and predictions and pictures into job.logs; a collective.

    Rank 0 writes the files. Predictions and pictures of an earlier training in the same folder are deleted. Predictions
    are written if `tested`, the evaluation of these weights on the test split, has them; pictures if the recipe draws
    some. The result is the digest of the weights, the same on all ranks.

    Raises:
        InputError: A file cannot be written. Rank 0 alone raises it.
    """
    path = Path(job.model_path)
    is_first = distributed.get_rank() == 0
    with writing_to(path.parent, job.chosen_by):
        digest = write_weights(setup, job, path, tested.measures)
        drawn = draw_pictures(setup.state, setup.test.split) if is_first or is_sharded(setup.state.model) else []
        for name in (PREDICTIONS, PICTURES) if is_first else ():
            Path(job.logs, name).unlink(missing_ok=True)
        if tested.predictions is not None:
            write_predictions(tested.predictions, setup, Path(job.logs, PREDICTIONS))
        if is_first and drawn:
            write_pictures(drawn, Path(job.logs, PICTURES))
    return digest


def write_predictions(predictions: Tensor, setup: SetUp, path: Path) -> None:
    """Write the predictions of all ranks to an .npy file, a row for each test sample in order; a collective.

    This rank has (n, ...), those of its test samples. Rank 0 writes them batch by batch, so that no rank ever has them
    all.

    Raises:
        OSError: Rank 0 cannot write the file. Rank 0 alone raises it, once it has received the rows of the others.
    """
    test = setup.test
    rows = gather(predictions, setup.test, setup.state.device)
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
    setup: SetUp, job: Job, path: Path, measures: dict[str, float], weights: Mapping[str, Tensor | Shard] | None = None
) -> str:
    """Write weights with their metadata to a file, and return their digest; a collective.

    Rank 0 writes the file. The file does not have the weights that model() has frozen: whoever loads the file gets them
    from model(). By default the weights are those that the training evaluates, which may be an average.

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
    """Return what a weights file says about its weights.

    `training` says what the weights were trained on: world_size, hardware and precision. The base digest is that of the
    frozen weights that the file leaves out; empty without any.
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
    """Draw the recipe's pictures of the first test samples; a collective if the network is sharded.

    The network that is evaluated runs on these samples, and is left in evaluation mode. Otherwise one rank calls it
    alone.

    Returns:
        At most MOST_PICTURES captions and pictures, as the recipe's pictures() returns them; none if the recipe does
        not define pictures().
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
    """Write pictures, whose numbers are from 0 to 1, with their captions to an .npz file for the report.

    It gets an array `captions`, and each picture as uint8 under its number.
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

    If a weight is sharded, it is a collective: rank 0 calls this, while the others call fill(None, weights, device),
    which sends their rows from and to the device. Otherwise one process calls it alone. Tied weights are saved once.
    Metadata are written into the file, if given.

    Raises:
        OSError: The file cannot be written. The other ranks are not left waiting.
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
