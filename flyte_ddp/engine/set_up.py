"""Sets up a training on one rank: the recipe, its batches, and the state that steps change."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from flyte_ddp.engine.attributes import check_attributes
from flyte_ddp.engine.batches import TestBatches, TrainBatches
from flyte_ddp.engine.block_cache import BlockCache
from flyte_ddp.engine.choice import Choice, is_lower_better
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import load_recipe, load_split, validation_of
from flyte_ddp.engine.measures import augment, code_location
from flyte_ddp.engine.memory import recompute
from flyte_ddp.engine.placement import place
from flyte_ddp.engine.probe import Probed, probe
from flyte_ddp.engine.sharding import check_batch_norm, on_trial
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.warm_start import continue_from, freeze, is_checkpoint, start_from
from flyte_ddp.errors import InputError
from flyte_ddp.events import NotLearning
from flyte_ddp.frozen_base import FrozenBase, frozen_weights
from flyte_ddp.launch.environment import Environment
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings

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
    base = FrozenBase(model, left_out)
    average = place(recipe, model, base, job.options, environment)
    constant_loss, total_steps = recipe.constant_loss(), settings.epochs * len(batches)
    mixed = not (constant_loss or recipe.couples_samples)  # then outputs are also paired with other samples
    splits = {"train": train, "test": test}
    if validation and recipe.has_validation:
        splits["validation"] = validation
    with on_trial(recipe, model):
        found = probe(recipe, model, splits, total_steps, mixed)
    check_batch_norm(recipe, model, found.rows.normalised)
    state = TrainingState(
        recipe, model, found.rows, found.names, device, world_size,
        autocast=precision == "bfloat16", total_steps=total_steps, constant_loss=constant_loss,
        base=base, average=average, log_gradients=job.options.log_gradients,
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
    """The network with its initial weights, unless training continues from a checkpoint, on the CPU; the names of those
    that model() provides and freezes; and remarks."""
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


def choose_precision(precision: str, device: torch.device) -> str:
    """For auto, bfloat16 if the hardware supports it: emulated, it is slower than float32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"
