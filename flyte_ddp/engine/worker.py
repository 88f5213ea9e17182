"""One rank from start to end, whoever started its process."""

import io
import os
import pkgutil
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, List, Optional, Tuple, Union

import numpy as np
import torch
from torch import distributed, nn

from flyte_ddp.engine.batches import Resident, Split, TestBatches, TrainBatches
from flyte_ddp.engine.checkpoint import CheckpointWriter, NoCheckpoints, read_checkpoint
from flyte_ddp.engine.dynamo import leave_dynamo_out
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.layers import convert
from flyte_ddp.engine.loading import Streamed
from flyte_ddp.engine.loop import fit, gather
from flyte_ddp.engine.measures import augment, place
from flyte_ddp.engine.probe import probe
from flyte_ddp.engine.profile import profiling
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.errors import CheckpointError, InputError, NonFinite
from flyte_ddp.events import CheckpointRefused, NotLearning, RunStarted
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipe import Recipe
from flyte_ddp.storage import write_whole, writing_to
from flyte_ddp.user_code import check_imports

SPLITS = ("train", "test")
MOST_PICTURES = 24


def run(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """One rank from its meeting with the others to their parting; see train."""
    with process_group(environment, job.timeout_seconds) as device:
        return train(environment, device, link, job)


def train(environment: Environment, device: torch.device, link: Link, job: Job) -> TrainingResult:
    """Trains as this rank of the process group; rank 0 leaves the weights at job.model_path."""
    leave_dynamo_out()
    keep_freed_memory()
    torch.set_num_threads(environment.threads)
    settings, rank, world_size = job.identity.settings, environment.rank, environment.world.size
    precision = choose_precision(settings.precision, device)
    # A recipe's data and weights may be drawn by any of these
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    recipe = load_recipe(job, device)
    train, test = (open_split(recipe, split, job) for split in SPLITS)
    train_batches = TrainBatches(
        train,
        settings.batch_size,
        settings.seed,
        rank,
        world_size,
        recipe.passes_per_epoch,
        recipe.train_fraction,
        lambda tree, generator, share: augment(recipe, tree, generator, share),
    )
    torch.manual_seed(settings.seed)
    model = convert(recipe.model().to(device), recipe.share)
    last_batches = (train_batches.samples, settings.batch_size), (len(test), settings.test_batch_size)
    may_be_empty = any((samples % size or size) < world_size for samples, size in last_batches)
    names, headline, reasons = probe(recipe, model, train, may_be_empty)
    constant_loss = recipe.constant_loss()
    state = TrainingState(
        recipe,
        model,
        names,
        device,
        world_size,
        autocast=precision == "bfloat16",
        total_steps=settings.epochs * len(train_batches),
        constant_loss=constant_loss,
    )
    state.watch.warnings += [NotLearning(0, 0, f"the result depends on the number of ranks: {one}") for one in reasons]
    resume(state, job, environment, link)
    link.emit(
        RunStarted(
            dataset=job.dataset,
            samples=recipe.samples,
            headline=headline,
            shares=recipe.shares,
            train_samples=len(train),
            test_samples=len(test),
            samples_per_epoch=train_batches.samples,
            world_size=world_size,
            backend=environment.world.backend,
            device=str(device),
            precision=precision,
            epochs=settings.epochs,
            steps_per_epoch=len(train_batches),
            first_epoch=state.epoch,
            first_step=state.step,
            startup_seconds=time.time() - job.launched,
            layers=layers_of(state.model),
        )
    )
    for reason in state.watch.warnings if reasons and not state.history else ():
        link.emit(reason)
    checkpoints = checkpoints_of(environment, link, job)
    samples_before = state.epoch * train_batches.samples + train_batches.samples_until(state.step)
    seconds_before = train_seconds(state)
    mixed = not (constant_loss or recipe.couples_samples)  # then outputs are tried on other samples
    test_batches = TestBatches(test, settings.test_batch_size, rank, world_size, mixed)
    try:
        with profiling(job.profile_path, rank, state.optimizer):
            predicted = fit(
                state, train_batches, test_batches, settings.epochs, settings.log_interval, link, checkpoints
            )
    except NonFinite:  # on all ranks at once, and the first report of it ends them all
        checkpoints.close()
        distributed.barrier()
        raise
    finally:
        checkpoints.close()
    predictions = None if predicted is None else gather(predicted, test_batches)
    if rank == 0:
        with writing_to(Path(job.model_path).parent, "DDP_RUNS_DIR"):
            export_model(state.evaluated, Path(job.model_path))
            if predictions is not None:
                np.save(job.predictions_path, predictions.cpu().numpy())
            draw_pictures(state, test, Path(job.pictures_path))
    return TrainingResult(
        epochs=state.history,
        warnings=state.watch.warnings,
        headline=headline,
        train_samples=len(train),
        test_samples=len(test),
        precision=precision,
        rank=rank,
        host=environment.host,
        samples_per_second=(settings.epochs * train_batches.samples - samples_before)
        / world_size
        / max(train_seconds(state) - seconds_before, 1e-9),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def load_recipe(job: Job, device: torch.device) -> Recipe:
    """The recipe that the job names, with its settings and data; InputError where there is none."""
    if job.root and job.root not in sys.path:
        sys.path.insert(0, job.root)
    name, before = job.identity.recipe, set(sys.modules)
    kind = pkgutil.resolve_name(name)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise InputError(f"{name} must be a subclass of flyte_ddp.recipe.Recipe, got {kind!r}")
    recipe = kind(job.identity.settings, Path(job.data) if job.data else None)
    if not hasattr(recipe, "share"):
        raise InputError(f"{place(recipe, '__init__')} must call super().__init__(settings, data_path)")
    recipe.device = device
    if job.root:
        check_imports(job.root, job.code_files, before)
    return recipe


def open_split(recipe: Recipe, split: str, job: Job) -> Split:
    """The samples of a split; InputError, naming the place in the recipe, where they are not such."""
    data = recipe.data(split)
    try:
        if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.TensorDataset):
            if isinstance(data, torch.utils.data.IterableDataset) or not len(data):  # type: ignore[arg-type]
                raise InputError("a Dataset must have samples, and a length")
            return Streamed(data, recipe.device, job.loader_workers, job.pin_memory)
        data = data.tensors if isinstance(data, torch.utils.data.TensorDataset) else data
        return Resident(data, recipe.device)
    except InputError as error:
        raise InputError(f'{place(recipe, "data")}, split "{split}": {error.message}') from None


@torch.inference_mode()
def draw_pictures(state: TrainingState, test: Split, path: Path) -> None:
    """Leaves what the recipe shows of the first test samples, if anything, as an .npz for the report."""
    recipe, count = state.recipe, min(len(test), MOST_PICTURES)
    (tree,) = test.fetch(torch.arange(count), [slice(0, count)])
    vars(recipe.share).update(first=0, count=count, size=count, alone=True)
    outputs: Optional[Any] = recipe.forward(state.evaluated.eval(), tree)
    drawn = recipe.pictures(outputs, tree)[:MOST_PICTURES]
    if drawn:
        images = [picture.detach().cpu().float().clamp(0, 1).mul(255).round().byte().numpy() for _, picture in drawn]
        captions = np.array([caption for caption, _ in drawn])
        arrays: Any = {str(number): image for number, image in enumerate(images)}
        np.savez(path, captions=captions, **arrays)


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next step, rather than give it to the kernel and get it back page by page.

    Once a block of its own mapping is freed, blocks up to that size come from the heap, of which twice as much may lie
    idle (mallopt(3), M_MMAP_THRESHOLD). Without it a step of mnist_cnn has 1,000 to 2,000 page faults, which take a
    tenth of its time. Elsewhere than in glibc it does nothing.
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # bytes; 32 MiB is the most that counts


def choose_precision(precision: str, device: torch.device) -> str:
    """bfloat16 for auto where the hardware computes in it: elsewhere it is emulated, slower than float32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"


def resume(state: TrainingState, job: Job, environment: Environment, link: Link) -> None:
    """Puts all ranks where an earlier run's checkpoint left rank 0, if there is one that belongs to this training."""
    found: List[Any] = [None]
    if environment.rank == 0 and os.path.exists(job.checkpoint_path):
        try:
            found = [read_checkpoint(Path(job.checkpoint_path), job.identity.as_dict())["state"]]
        except CheckpointError as error:
            link.emit(CheckpointRefused(f"the checkpoint {error}"))
    distributed.broadcast_object_list(found)  # other hosts do not see rank 0's disk
    if found[0]:
        state.load_state_dict(found[0])


def checkpoints_of(environment: Environment, link: Link, job: Job) -> Union[CheckpointWriter, NoCheckpoints]:
    if environment.rank == 0:
        return CheckpointWriter(Path(job.checkpoint_path), job.identity.as_dict(), job.checkpoint_seconds, link.emit)
    return NoCheckpoints()


def train_seconds(state: TrainingState) -> float:
    return sum(epoch.train_seconds for epoch in state.history) + state.epoch_seconds


def layers_of(model: nn.Module) -> List[Tuple[str, str, int]]:
    """Name, type and number of parameters of each module that has parameters of its own."""
    counted = (
        (name, type(module).__name__, sum(p.numel() for p in module.parameters(recurse=False)))
        for name, module in model.named_modules()
    )
    return [layer for layer in counted if layer[2]]


def export_model(model: nn.Module, path: Path) -> None:
    """Writes the weights as a plain CPU state_dict of contiguous tensors; path appears whole or not at all."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    write_whole(path, buffer.getbuffer())
