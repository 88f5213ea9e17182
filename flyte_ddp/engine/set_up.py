"""Sets up a training on one rank: the recipe, its batches, and the state that steps change."""

import os
import pkgutil
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flyte_ddp.data.blocks import Blocks
from flyte_ddp.data.description import StoredData
from flyte_ddp.engine.attributes import check_attributes
from flyte_ddp.engine.batches import TestBatches, TrainBatches
from flyte_ddp.engine.block_cache import BlockCache
from flyte_ddp.engine.block_split import BlockSplit, Reading
from flyte_ddp.engine.choice import Choice, is_lower_better
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.lengths import Lengths
from flyte_ddp.engine.loading import Streamed
from flyte_ddp.engine.measures import augment, code_location
from flyte_ddp.engine.memory import recompute
from flyte_ddp.engine.probe import Probed, probe
from flyte_ddp.engine.splits import Resident, Split, hold_out
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.warm_start import continue_from, freeze, is_checkpoint, start_from
from flyte_ddp.errors import InputError
from flyte_ddp.events import NotLearning
from flyte_ddp.frozen_base import frozen_weights
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.rank import own_lock_of_tqdm
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.user_code import checked_imports

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Parts:
    """found: what the probe found. precision: float32 or bfloat16. remarks: which weights training starts with."""

    state: TrainingState
    train: TrainBatches
    validation: TestBatches | None
    test: TestBatches
    found: Probed
    precision: str
    remarks: list[str]


def set_up(environment: Environment, device: torch.device, job: Job, cache: BlockCache) -> Parts:
    """A collective; InputError for an invalid recipe, or one whose result would depend on the number of ranks."""
    settings, rank, world_size = job.settings, environment.rank, environment.world.size
    precision = choose_precision(settings.precision, device)
    recipe = load_recipe(job, device)
    train, test = (load_split(recipe, split, job, cache) for split in SPLITS)
    check_attributes(recipe, world_size)
    kept, validation = validation_of(recipe, train, job, cache)
    batches = TrainBatches(
        kept,
        settings.batch_size,
        settings.seed,
        rank,
        world_size,
        recipe.passes_per_epoch,
        recipe.train_fraction,
        recipe.norm_samples,
        recipe.length_window,
        partial(augment, recipe),
    )
    if settings.evaluations_per_epoch > len(batches):
        raise InputError(
            f"evaluations_per_epoch must be at most the steps of an epoch, which are {len(batches)}, got "
            f"{settings.evaluations_per_epoch}: lower it, or batch_size"
        )
    model, left_out, remarks = first_model(recipe, job)
    constant_loss, total_steps = recipe.constant_loss(), settings.epochs * len(batches)
    mixed = not (constant_loss or recipe.couples_samples)  # then outputs are also paired with other samples
    splits = {"train": train, "test": test}
    if validation and recipe.has_validation:
        splits["validation"] = validation
    found = probe(recipe, model, splits, total_steps, mixed)
    state = TrainingState(
        recipe, model, found.rows, found.names, device, world_size,
        autocast=precision == "bfloat16", total_steps=total_steps, constant_loss=constant_loss,
        left_out=left_out, log_gradients=job.options.log_gradients,
    )  # fmt: skip
    recompute(recipe, model, found.rows)  # after the trials and the average, which are copies without it
    if validation:
        state.choice = choice_of(recipe, found.headline, settings)
    reasons = [f"the result depends on the number of ranks: {reason}" for reason in found.reasons]
    state.watch.warnings += [NotLearning(0, 0, reason) for reason in reasons]
    if job.init and job.init.is_file() and is_checkpoint(job.init):
        remarks.append(continue_from(state, job.init, job, len(batches)))
    place_in_world = settings.test_batch_size, rank, world_size, mixed
    validated = TestBatches(validation, *place_in_world) if validation else None
    return Parts(state, batches, validated, TestBatches(test, *place_in_world), found, precision, remarks)


def first_model(recipe: Recipe, job: Job) -> tuple[nn.Module, set[str], list[str]]:
    """The network with its initial weights, unless training continues from a checkpoint; the names of those that
    model() provides and freezes; and remarks."""
    settings: TrainingSettings = job.settings
    torch.manual_seed(settings.seed)
    recipe.has_read_init = False  # for a tokenizer, perhaps
    model, remarks, init = recipe.model(), [], job.init
    if init and init.is_dir():
        _check_folder(recipe, init)
        remarks.append(f"Starts from the folder {init.name}")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise InputError(
            f"{code_location(recipe, 'model')}: {lazy[0]} has no shape yet: call the network once in model(), on "
            "zeros of a batch's shape, or name the layer's size"
        )
    model = model.to(recipe.device)
    base = frozen_weights(model)
    if init and init.is_file() and not is_checkpoint(init):
        taken, remark = start_from(model, init, settings.init_leave_out)
        remarks.append(remark)
        base = {name: value for name, value in base.items() if name not in taken}
    if settings.freeze:
        remarks.append(freeze(model, settings.freeze))
    check_types(recipe, model)
    return model, set(base), remarks


def _check_folder(recipe: Recipe, init: Path) -> None:
    """Raises InputError where model() has left it aside, or settings are for a file."""
    if not recipe.has_read_init:
        raise InputError(
            f"{code_location(recipe, 'model')} must load init, which is the folder {init}: for example with "
            "from_pretrained(self.init_path), or give a file"
        )
    if recipe.settings.init_leave_out:
        raise InputError(
            f"init_leave_out must be empty, because model() itself loads the folder {init}, got "
            f"{recipe.settings.init_leave_out!r}"
        )


def check_types(recipe: Recipe, model: nn.Module) -> None:
    """Raises InputError for weights of a type that loses what an optimizer adds to them."""
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and not weight.requires_grad):
            continue
        rule, remedy = "what is trained must be float32, or small updates are lost", "call float() on it"
        if not weight.requires_grad:
            rule, remedy = "what is frozen must be float32 or bfloat16", "call bfloat16() on it"
        raise InputError(
            f"{code_location(recipe, 'model')}: {name} is {str(weight.dtype).removeprefix('torch.')}, but {rule}: "
            f"{remedy}, or give from_pretrained a dtype (precision decides what is computed in)"
        )


def validation_of(recipe: Recipe, train: Split, job: Job, cache: BlockCache) -> tuple[Split, Split | None]:
    """The samples to train on, and those to choose the best epoch by, if there is a validation split."""
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
    settings.check_validation()
    return train, None


def choice_of(recipe: Recipe, headline: str, settings: TrainingSettings) -> Choice:
    """What chooses the best epoch; InputError if it is unknown whether higher or lower values are better."""
    measure = headline if settings.choose_by == "headline" else "loss"
    lower = is_lower_better(recipe, measure)
    if lower is None:
        raise InputError(
            f"{type(recipe).__name__}.higher_is_better or lower_is_better must name {measure}, which chooses the best "
            'epoch: add it to one of them, or set choose_by to "loss"'
        )
    return Choice(measure, lower, settings.patience, settings.minimum_delta)


def load_recipe(job: Job, device: torch.device) -> Recipe:
    """The recipe that the job names, with its settings and data; InputError if that is not a recipe. Seeds all sources
    of random numbers, since the recipe's data and weights may be drawn from any of them.
    """
    seed = job.settings.seed
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else from_pretrained("a name") would download in each rank
    if job.root and job.root not in sys.path:
        sys.path.insert(0, job.root)
    name = job.recipe
    with checked_imports(job.root, job.files):
        kind = pkgutil.resolve_name(name)
        own_lock_of_tqdm()
        if not (isinstance(kind, type) and issubclass(kind, Recipe)):
            raise InputError(f"{name} must be a subclass of flyte_ddp.recipe.Recipe, got {kind!r}")
        recipe = kind(job.settings, data_path_of(job.data))
    if not hasattr(recipe, "share"):
        raise InputError(f"{code_location(recipe, '__init__')} must call super().__init__(settings, data_path)")
    recipe.device = device
    recipe.init_path = job.init if job.init and job.init.is_dir() else None
    return recipe


def data_path_of(data: Path | StoredData | None) -> Path | str | None:
    if not isinstance(data, StoredData):
        return data
    from flyte_ddp.data.stored import use_storage_options  # it imports fsspec, which other trainings do without

    use_storage_options(data.options)
    return data.url


def load_split(recipe: Recipe, split: str, job: Job, cache: BlockCache) -> Split:
    """The samples of a split; InputError, naming the place in the recipe, if the data are invalid."""
    data = recipe.data(split)
    options = job.options
    try:
        if isinstance(data, Blocks):
            if recipe.lengths(split) is not None or recipe.length_window:
                raise InputError("samples in Blocks have one shape: leave out lengths and length_window")
            return BlockSplit(data, split, Reading(cache, recipe.device, options.loader_workers, options.pin_memory))
        if isinstance(data, torch.utils.data.IterableDataset):
            raise InputError(
                "an IterableDataset has no order that could be resumed or shared among ranks: return Blocks, which "
                "are read one after the other, too, or a Dataset with a length"
            )
        if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.TensorDataset):
            if not len(data):  # type: ignore[arg-type]
                raise InputError("a Dataset must have samples, and a length")
            workers, pin_memory = options.loader_workers, options.pin_memory
            found: Streamed | Resident = Streamed(data, recipe.device, workers, pin_memory)
        else:
            data = data.tensors if isinstance(data, torch.utils.data.TensorDataset) else data
            found = Resident(data, recipe.device)
    except InputError as error:
        raise InputError(f'{code_location(recipe, "data")}, split "{split}": {error.message}') from None
    return with_lengths(found, recipe, split)


def with_lengths(found: Streamed | Resident, recipe: Recipe, split: str) -> Split:
    """The samples with their lengths, if the recipe has any; InputError for lengths that are not theirs."""
    each = recipe.lengths(split)
    if each is not None:
        if isinstance(found, Streamed):
            found.is_padded = True
        try:
            found.lengths = Lengths(each, len(found), lambda indices: next(iter(found.fetch([indices]))))
        except InputError as error:
            raise InputError(f'{code_location(recipe, "lengths")}, split "{split}": {error.message}') from None
    elif split == "train" and recipe.length_window:
        owner = type(recipe).__name__
        raise InputError(f"{owner}.length_window must be 0 without {owner}.lengths, got {recipe.length_window}")
    return found


def choose_precision(precision: str, device: torch.device) -> str:
    """For auto, bfloat16 if the hardware supports it: emulated, it is slower than float32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"
