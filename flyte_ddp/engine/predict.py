"""The predictions of any recipe's trained network for a shard of a split, in a process of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.engine.batches.batches import rank_slice
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import load_recipe, load_split
from flyte_ddp.engine.measures import check_rows
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Recipe
from flyte_ddp.whole_files import whole_file, writing_to


@torch.inference_mode()
def run(environment: Environment, link: Link, argument: tuple[Job, str, int, int]) -> int:
    """Write a trained network's predictions for a shard of a split to job.logs/predictions-<shard>.npy.

    The network has the weights of the file job.model_path, and computes in float32. A launcher calls this in a process
    of its own, without other ranks. A shard has consecutive samples of the split. The rows are in the order of the
    samples.

    Args:
        environment: this process's rank, device and threads.
        link: told after each batch that the process is alive.
        argument: the job, the name of the split, the shard's index from 0, and the number of shards.

    Returns:
        The number of rows in the file, one for each sample of the shard; it may be 0.

    Raises:
        InputError: The recipe has no such split. Or predictions() does not return a tensor with a row for each sample,
            of the same shape in all batches. Or the recipe or its data are invalid, the weights do not fit the network,
            or the file cannot be written.
    """
    job, split, number, count = argument
    torch.set_num_threads(environment.threads)
    settle_arithmetic()
    settings = job.settings
    device = torch.device(environment.world.device)
    with BlockCache(environment, job.options.cache_bytes) as cache:
        with checked_imports(job.root, job.files):
            recipe = load_recipe(job, device)
            _check_split(recipe, split)
            source = load_split(recipe, split, job, cache)
            model = recipe.trained_model(job.model_path).to(device)
        first, last = rank_slice(0, len(source), number, count)
        size = settings.test_batch_size
        parts: list[Tensor] = []
        # Where there are more shards than samples, one that has none takes a sample for the shape of its rows
        start = min(first, len(source) - 1)
        batches = torch.arange(start, max(last, start + 1)).split(size)
        lengths = get_lengths(source)
        for chosen, tree in zip(batches, source.fetch(batches), strict=True):
            tree = lengths.padded(tree, chosen, chosen) if lengths else tree
            recipe.share = BatchShare(0, len(chosen), len(chosen), alone=True)
            predictions: Any = recipe.predictions(recipe.forward(model, tree), tree)
            check_rows(recipe, predictions, len(chosen), parts[0] if parts else None)
            parts.append(predictions.cpu())
            link.heartbeat()
    rows = torch.cat(parts)[: last - first].numpy()
    with writing_to(job.logs, "DDP_RUNS_DIR"), whole_file(Path(job.logs, f"predictions-{number}.npy")) as file:
        np.save(file, rows)
    return len(rows)


def _check_split(recipe: Recipe, split: str) -> None:
    """Raise InputError if a recipe has no split of this name, for which its data() might return another one."""
    splits = ("train", "validation", "test") if recipe.has_validation else ("train", "test")
    if split not in splits:
        remedy = "; what validation_fraction holds out is a part of train" if split == "validation" else ""
        raise InputError(f"split must be one of {', '.join(splits)}, got {split!r}: correct it{remedy}")
