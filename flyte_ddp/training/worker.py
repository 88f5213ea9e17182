"""One rank from start to end, whoever started its process."""

import io
import os
import resource
import time
from pathlib import Path
from typing import Any, List, Tuple, Union

import numpy as np
import torch
from torch import distributed, nn

from flyte_ddp.training import prepared
from flyte_ddp.training.batches import TestBatches, TrainBatches
from flyte_ddp.training.checkpoint import CheckpointWriter, NoCheckpoints, read_checkpoint
from flyte_ddp.training.dynamo import leave_dynamo_out
from flyte_ddp.training.environment import Environment
from flyte_ddp.training.errors import CheckpointError, NonFinite
from flyte_ddp.training.events import CheckpointRefused, RunStarted
from flyte_ddp.training.job import Job, TrainingResult
from flyte_ddp.training.loading import open_source
from flyte_ddp.training.loop import Link, fit, gather
from flyte_ddp.training.models import build_model
from flyte_ddp.training.process_group import process_group
from flyte_ddp.training.profile import profiling
from flyte_ddp.training.state import TrainingState
from flyte_ddp.training.storage import write_whole, writing_to


def run(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """One rank from its meeting with the others to their parting; see train."""
    with process_group(environment, job.timeout_seconds) as device:
        return train(environment, device, link, job)


def train(environment: Environment, device: torch.device, link: Link, job: Job) -> TrainingResult:
    """Trains as this rank of the process group; rank 0 leaves the weights at job.model_path."""
    leave_dynamo_out()
    keep_freed_memory()
    torch.set_num_threads(environment.threads)
    hp, rank, world_size = job.identity.hp, environment.rank, environment.world.size
    precision = choose_precision(hp.precision, device)
    description = prepared.read_description(Path(job.data))
    train, test = (open_source(Path(job.data), split, device) for split in prepared.SPLITS)
    train_batches = TrainBatches(
        train,
        description.passes_per_epoch,
        hp.batch_size,
        hp.seed,
        rank,
        world_size,
        train_fraction=hp.train_fraction,
        shift_pixels=hp.shift_pixels,
        flip=hp.flip,
    )
    state = TrainingState(
        build_model(hp.model, hp.seed, description.image_shape, len(description.classes)),
        device,
        world_size,
        autocast=precision == "bfloat16",
        label_smoothing=hp.label_smoothing,
        learning_rate=hp.learning_rate,
        momentum=hp.sgd_momentum,
        nesterov=hp.nesterov,
        weight_decay=hp.weight_decay,
        clip_norm=hp.clip_norm,
        schedule=hp.schedule,
        warmup_fraction=hp.warmup_fraction,
        total_steps=hp.epochs * len(train_batches),
        ema_decay=hp.ema_decay,
        constant_loss=entropy(test.labels),
    )
    resume(state, job, environment, link)
    link.emit(
        RunStarted(
            dataset=description.name,
            train_samples=len(train),
            test_samples=len(test),
            samples_per_epoch=train_batches.samples,
            world_size=world_size,
            backend=environment.world.backend,
            device=str(device),
            precision=precision,
            epochs=hp.epochs,
            steps_per_epoch=len(train_batches),
            first_epoch=state.epoch,
            first_step=state.step,
            startup_seconds=time.time() - job.launched,
            layers=layers_of(state.model),
        )
    )
    checkpoints = checkpoints_of(environment, link, job)
    samples_before = state.epoch * train_batches.samples + train_batches.samples_until(state.step)
    seconds_before = train_seconds(state)
    test_batches = TestBatches(test, hp.test_batch_size, rank, world_size)
    try:
        with profiling(job.profile_path, rank, state.optimizer):
            scores = fit(state, train_batches, test_batches, hp.epochs, hp.log_interval, link, checkpoints)
    except NonFinite:  # on all ranks at once, and the first report of it ends them all
        checkpoints.close()
        distributed.barrier()
        raise
    finally:
        checkpoints.close()
    predictions = gather(scores, test_batches)
    if rank == 0:
        with writing_to(Path(job.model_path).parent, "DDP_RUNS_DIR"):
            export_model(state.evaluated, Path(job.model_path))
            np.save(job.predictions_path, predictions.cpu().numpy())
    return TrainingResult(
        epochs=state.history,
        warnings=state.watch.warnings,
        precision=precision,
        rank=rank,
        host=environment.host,
        samples_per_second=(hp.epochs * train_batches.samples - samples_before)
        / world_size
        / max(train_seconds(state) - seconds_before, 1e-9),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


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


def entropy(labels: torch.Tensor) -> float:
    """Of the frequencies of labels (N,) int64: the least mean loss of a prediction that is the same for all of them."""
    counts = labels.bincount().double()
    return torch.special.entr(counts / counts.sum()).sum().item()


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
