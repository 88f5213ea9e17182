"""The set-up of a training on one rank: the recipe, its batches, and the state that steps change."""

from dataclasses import dataclass
from functools import partial

import torch

from flyte_ddp.engine.attributes import check_attributes
from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.checkpoints.warm_start import is_checkpoint, load_init_checkpoint
from flyte_ddp.engine.checks.probe import Probed, probe
from flyte_ddp.engine.collectives import all_reduce_flags
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import load_recipe, load_split, split_off_validation
from flyte_ddp.engine.measures import augment, finite_number
from flyte_ddp.engine.monitor.best_tracker import BestTracker, is_lower_better
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.network.compiled import check_device, compile_layers
from flyte_ddp.engine.network.first_model import first_model
from flyte_ddp.engine.network.memory import checkpoint_activations
from flyte_ddp.engine.network.placement import to_device
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.sharding.sharding import is_sharded, on_trial
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.virtual_ranks.rules import check_recipe, check_settings, uneven_parts
from flyte_ddp.errors import CheckpointError, InputError
from flyte_ddp.events import NotLearning, StartUp
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.model_files.frozen_base import FrozenBase
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.text import listed

SPLITS = ("train", "test")
SILENT = Link()


@dataclass(frozen=True)
class SetUp:
    """A training that is ready for its first step.

    Attributes:
        state: the network and all else that steps change.
        train: the batches of the training.
        validation: the batches that choose the best epoch, if there are any.
        test: the batches of the test split.
        probed: what the probe found.
        precision: float32 or bfloat16.
        remarks: sentences on how this training begins, such as with which weights.
        warnings: warnings that are also told when the training is resumed.
    """

    state: TrainingState
    train: TrainBatches
    validation: EvaluationBatches | None
    test: EvaluationBatches
    probed: Probed
    precision: str
    remarks: list[str]
    warnings: list[NotLearning]


def set_up(
    environment: Environment,
    device: torch.device,
    job: Job,
    cache: BlockCache,
    precision: str = "",
    link: Link = SILENT,
) -> SetUp:
    """Load the recipe and its data, try them on some samples, and build everything that a training needs; a collective.

    The training that is returned is before its first step. If job.init is a checkpoint, it is loaded already. The
    training's own checkpoint, for a resume, is not.

    Args:
        environment: this rank, and the number of ranks.
        device: this rank's device.
        job: the job.
        cache: the cache for samples in Blocks.
        precision: the precision, "float32" or "bfloat16", of the checkpoint to resume from. If it is "", the settings
            decide, and bfloat16 is chosen only if it suits all ranks.
        link: told what happens during the start.

    Raises:
        InputError: The recipe, its settings or its data are invalid.
    """
    settings = job.settings
    rank = environment.rank
    world_size = environment.world.size
    check_settings(settings, job.options, world_size)
    if not precision:  # ranks may have different hardware, and bfloat16 needs the support of all
        is_float32 = choose_precision(settings.precision, device) == "float32"
        precision = "float32" if any(all_reduce_flags([is_float32], device)) else "bfloat16"
    if job.options.compile:
        check_device(device)
    recipe = load_recipe(job, device)
    check_recipe(recipe)
    train, test = (load_split(recipe, split, job, cache) for split in SPLITS)
    check_attributes(recipe)
    kept, validation = split_off_validation(recipe, train, job, cache)
    batches = TrainBatches(
        kept,
        settings.batch_size,
        settings.seed,
        rank,
        world_size,
        recipe.passes_per_epoch,
        recipe.train_fraction,
        recipe.length_window,
        partial(augment, recipe),
        settings.virtual_ranks,
    )
    if settings.evaluations_per_epoch > len(batches):
        raise InputError(
            f"evaluations_per_epoch must be at most the steps of an epoch, which are {len(batches)}, got "
            f"{settings.evaluations_per_epoch}: lower it, or batch_size"
        )
    model, left_out, remarks = first_model(recipe, job)
    if recipe.passes_per_epoch > 1:
        remarks.append(f"an epoch passes over the training {recipe.samples} {recipe.passes_per_epoch} times")
    remarks += uneven_parts(settings.virtual_ranks, world_size)
    base = FrozenBase(model, left_out)
    average = to_device(recipe, model, base, job.options, environment, precision)
    constant_loss = finite_number(recipe, "constant_loss")
    total_steps = settings.epochs * len(batches)
    splits = {"train": train, "test": test}
    if validation and recipe.has_validation:
        splits["validation"] = validation
    link.emit(StartUp("trying the recipe on some samples"))
    with on_trial(recipe, model):
        probed = probe(recipe, model, splits, total_steps, constant_loss)
    monitor = LossMonitor(constant_loss, settings.epochs)
    state = TrainingState(
        recipe, model, probed.names, Progress(device, link, monitor), batches, device,
        autocast=precision == "bfloat16", total_steps=total_steps,
        base=FrozenBase(model, base.names - probed.moving) if probed.moving else base,  # which model() does not provide
        moving=probed.moving, has_unused=probed.has_unused, gathers=probed.gathers, average=average,
        log_gradients=job.options.log_gradients,
    )  # fmt: skip
    if state.left_out:
        remarks.append(
            f"optimizer() is not given {listed(state.left_out)}: they stay as they are, and requires_grad_(False) on "
            "them would save their gradients"
        )
    # After the trials and the average, which are copies without these
    if job.options.compile:
        compile_layers(recipe, [model, average.model] if average else [model])
    checkpoint_activations(recipe, model, probed.changing)
    if validation:
        state.best_tracker = make_best_tracker(recipe, probed.headline, settings)
    reasons = list[str]()
    if settings.batch_size > batches.samples:
        reasons.append(
            f"batch_size is {settings.batch_size}, but an epoch has no more than {batches.samples} training "
            f"{recipe.samples}, so that each is a single step: lower batch_size"
        )
    warnings = monitor.record(0, 0, (*reasons, *probed.warnings))
    if job.init and job.init.is_file() and is_checkpoint(job.init):
        try:
            remarks.append(load_init_checkpoint(state, job.init, job, len(batches)))
        except CheckpointError as error:
            raise InputError(f"init: the checkpoint {job.init} {error}") from None
    place_in_world = settings.test_batch_size, rank, world_size, probed.is_mixed, settings.virtual_ranks
    validated = EvaluationBatches(validation, *place_in_world) if validation else None
    tested = EvaluationBatches(test, *place_in_world)
    if settings.virtual_ranks and is_sharded(model):
        for some in filter(None, (batches, validated, tested)):
            some.is_even = True
    return SetUp(state, batches, validated, tested, probed, precision, remarks, warnings)


def make_best_tracker(recipe: Recipe, headline: str, settings: TrainingSettings) -> BestTracker:
    """Make the tracker that chooses the best epoch, by the headline or, if settings.choose_by says so, by the loss.

    Raises:
        InputError: The recipe does not say whether higher or lower values of the headline are better.
    """
    measure = headline if settings.choose_by == "headline" else "loss"
    lower = is_lower_better(recipe, measure)
    if lower is None:
        raise InputError(
            f"{type(recipe).__name__}.higher_is_better or lower_is_better must name {measure}, which chooses the best "
            'epoch: add it to one of them, or set choose_by to "loss"'
        )
    return BestTracker(measure, lower, settings.patience, settings.minimum_delta)


def choose_precision(precision: str, device: torch.device) -> str:
    """Return the precision that suits this rank, "float32" or "bfloat16".

    Ranks with different hardware may get different answers, so the caller has to agree on one.

    Args:
        precision: the setting. "float32" and "bfloat16" are returned as they are. "auto" gives "bfloat16" if the device
            computes in bfloat16 natively and torch has kernels for it: emulated bfloat16 is slower than float32.
        device: this rank's device.
    """
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    # ATEN_CPU_CAPABILITY may keep torch from the kernels that the processor has instructions for
    uses_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    there = torch.cpu.get_capabilities()
    return "bfloat16" if uses_avx512 and (there.get("avx512_bf16") or there.get("amx_bf16")) else "float32"
