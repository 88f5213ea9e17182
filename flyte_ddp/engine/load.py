"""The recipe that a job names, and the samples of its splits."""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.data.blocks.blocks import Blocks
from flyte_ddp.data.description import StoredData
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.block_split import BlockSplit
from flyte_ddp.engine.batches.lengths import Lengths
from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.batches.splits import Resident, Split, hold_out
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.errors import InputError
from flyte_ddp.launch.output import own_lock_of_tqdm
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions, TrainingSettings


def load_named(job: Job) -> Any:
    """Import the class or function that job.recipe names as "module:name", and return it.

    Before the import, the global random generators are seeded with settings.seed. job.root is put first on sys.path,
    unless it is there already. The environment variable HF_HUB_OFFLINE becomes 1 if it is not set.

    Raises:
        InputError: The module has no such name, or imports code that is not among the job's files.
    """
    seed_all(job.settings.seed)  # data and weights may be drawn from any generator
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else from_pretrained("a name") would download in each rank
    if job.root and job.root not in sys.path:
        sys.path.insert(0, job.root)
    with checked_imports(job.root, job.files):
        place, _, name = job.recipe.partition(":")
        module = import_module(place)
        if not hasattr(module, name):  # find_code cannot tell for names that come from a star import
            raise InputError(f"{job.recipe}: {place} has no {name} at its top level")
        named = getattr(module, name)
    own_lock_of_tqdm()
    return named


def load_recipe(job: Job, device: torch.device) -> Recipe:
    """Import the recipe that the job names, and make it with the job's settings and data.

    Before that, load_named() seeds all global random generators, and changes sys.path and HF_HUB_OFFLINE. The recipe
    gets the device, and init_path if the training starts from a folder of weights. Errors that the recipe's __init__
    raises pass unchanged.

    Raises:
        InputError: The job names something other than a recipe, or the recipe's __init__ does not take settings and
            data_path, or does not call Recipe's.
    """
    with checked_imports(job.root, job.files):
        kind = load_named(job)
        if not (isinstance(kind, type) and issubclass(kind, Recipe)):
            raise InputError(
                f"{job.recipe} must be a subclass of flyte_ddp.Recipe, or to train a function def train(loop), got "
                f"{kind!r}"
            )
        arguments = job.settings, find_data_path(job.data)
        try:
            inspect.signature(kind).bind(*arguments)
        except TypeError as error:
            where = code_location(kind, "__init__")
            raise InputError(f"{where} must take settings and data_path, as Recipe's does: {error}") from None
        recipe = kind(*arguments)
    if not hasattr(recipe, "share"):
        raise InputError(f"{code_location(recipe, '__init__')} must call super().__init__(settings, data_path)")
    recipe.device = device
    recipe.init_path = job.init if job.init and job.init.is_dir() else None
    return recipe


def find_data_path(data: Path | StoredData | None) -> Path | str | None:
    """Return a recipe's data_path: the path or None as given, or the URL of stored data.

    For stored data, this function also sets the options of their storage for the whole process.
    """
    if not isinstance(data, StoredData):
        return data
    from flyte_ddp.data.remote_files import use_storage_options  # it imports fsspec, which other trainings do without

    use_storage_options(data.options)
    return data.url


def load_split(recipe: Recipe, split: str, job: Job, cache: BlockCache) -> Split:
    """Load the samples of a split ("train", "validation" or "test"), and their lengths if the recipe has lengths().

    If there are lengths, samples of a Dataset are padded when they are read.

    Args:
        recipe: the recipe, whose data(split) returns the samples.
        split: the name of the split.
        job: the job, for its options.
        cache: the cache for samples in Blocks.

    Raises:
        InputError: The data or lengths are invalid; or samples in Blocks have lengths or a length_window; or a
            length_window is set, and "train" has no lengths. The message names the place in the recipe.
    """
    data = recipe.data(split)
    try:
        if isinstance(data, Blocks) and (recipe.lengths(split) is not None or recipe.length_window):
            raise InputError("samples in Blocks have one shape: leave out lengths and length_window")
        samples = make_split(data, split, recipe.device, job.options, cache)
    except InputError as error:
        raise InputError(f'{code_location(recipe, "data")}, split "{split}": {error.message}') from None
    if isinstance(samples, BlockSplit):
        return samples
    each = recipe.lengths(split)
    if each is not None:
        if isinstance(samples, Streamed):
            samples.is_padded = True
        try:
            samples.lengths = Lengths(each, len(samples), lambda indices: next(iter(samples.fetch([indices]))))
        except InputError as error:
            raise InputError(f'{code_location(recipe, "lengths")}, split "{split}": {error.message}') from None
    elif split == "train" and recipe.length_window:
        owner = type(recipe).__name__
        raise InputError(f"{owner}.length_window must be 0 without {owner}.lengths, got {recipe.length_window}")
    return samples


def make_split(
    data: Any, split: str, device: torch.device, options: RunOptions, cache: BlockCache
) -> Streamed | Resident | BlockSplit:
    """Wrap a user's data, such as what Recipe.data returned, in a split from which batches can be read.

    Args:
        data: Blocks, which become a BlockSplit; a Dataset, which becomes a Streamed; or arrays in memory or
            memory-mapped, or a TensorDataset, which become a Resident.
        split: the name of the split; used for Blocks alone.
        device: where batches go. Arrays in memory are moved there at once.
        options: the options for reading.
        cache: the cache for Blocks; used for them alone.

    Raises:
        InputError: The data are invalid, such as an IterableDataset, a DataLoader, or a Dataset that is empty or has no
            length.
    """
    if isinstance(data, Blocks):
        return BlockSplit(data, split, cache, device, options.pin_memory)
    if isinstance(data, torch.utils.data.IterableDataset):
        raise InputError(
            "an IterableDataset has no order that could be resumed or shared among ranks: return Blocks, which are "
            "read one after the other, too, or a Dataset with a length"
        )
    if isinstance(data, torch.utils.data.DataLoader):
        raise InputError(
            "a DataLoader makes batches of its own, and must not be given: give its Dataset, as in loader.dataset"
        )
    plain = torch.utils.data.TensorDataset  # a subclass may transform its samples
    if isinstance(data, plain) and type(data).__getitem__ is plain.__getitem__ and type(data).__len__ is plain.__len__:
        data = data.tensors
    if not is_dataset(data):
        return Resident(data, device)
    try:
        length = len(data)
    except TypeError as error:
        raise InputError(f"a Dataset must have a length, got {type(data).__name__}: {error}") from None
    if not length:
        raise InputError("the split is empty, it must have samples: its Dataset has length 0")
    return Streamed(data, device, options.loader_workers, options.pin_memory)


def is_dataset(data: Any) -> bool:
    """Return whether data are a Dataset of torch, or an object with a length and items, such as one of Hugging Face.

    The answer is False for tensors, arrays, lists, dicts, networks, classes and DataFrames.
    """
    if isinstance(data, torch.utils.data.Dataset):
        return True
    if isinstance(data, (torch.Tensor, np.ndarray, Sequence, Mapping, torch.nn.Module, type)):
        return False
    if hasattr(data, "columns"):  # a DataFrame
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def split_off_validation(recipe: Recipe, train: Split, job: Job, cache: BlockCache) -> tuple[Split, Split | None]:
    """Return the samples to train on, and the validation split, by which the best epoch is chosen.

    The validation split is the recipe's own. If the recipe has none, the share validation_fraction of the training
    samples is held out.

    Args:
        recipe: the recipe.
        train: the training split.
        job: the job, with the settings and options.
        cache: the cache for samples in Blocks.

    Returns:
        The samples to train on, which are `train` itself unless a share is held out; and the validation split, or None.

    Raises:
        InputError: The recipe has a validation split although validation_fraction is set. Or there is no validation
            split although patience or keep_best is set. Or validation_fraction would leave one of the two splits empty.
    """
    settings: TrainingSettings = job.settings
    if recipe.has_validation:
        if settings.validation_fraction:
            raise InputError(
                f"validation_fraction must be 0 where the recipe has a validation split of its own, got "
                f"{settings.validation_fraction:g}"
            )
        return train, load_split(recipe, "validation", job, cache)
    if settings.validation_fraction:
        return hold_out(train, settings.validation_fraction)
    settings.check_validation(job.options.keep_best)
    return train, None
