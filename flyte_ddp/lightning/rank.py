"""A rank under Lightning's Trainer, in a process that our launcher has started."""

import logging
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden

from flyte_ddp.engine.batches.inherited_files import reopen_in_forks
from flyte_ddp.engine.checkpoints.same_training import check_same_training
from flyte_ddp.engine.digest import weights_digest
from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.engine.results import export_model
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import EpochChosen, StartUp
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.lightning.checkpoint import CheckpointFiles
from flyte_ddp.lightning.finite import find_not_finite
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.lightning_compat import after_train_start, call_hooks_without_epochs, settle_strategy_buckets
from flyte_ddp.lightning.loaders import Loaders
from flyte_ddp.lightning.measures import LoggedByValidation, read_measures
from flyte_ddp.lightning.modules import Parts, build
from flyte_ddp.lightning.observer import RankObserver
from flyte_ddp.lightning.remedies import with_remedy
from flyte_ddp.lightning.results import count_samples
from flyte_ddp.lightning.seeds import StepSeeds
from flyte_ddp.lightning.settings import LIMITS, PRECISIONS
from flyte_ddp.whole_files import writing_to

SAID_ELSEWHERE = (
    ".*(does not have many workers|using `DistributedSampler`|smaller than the logging interval|"
    "dataloader is not resumable)"
)


def run(environment: Environment, link: Link, job: LightningJob) -> TrainingResult:
    """Join the process group, train() in it, and leave it."""
    with process_group(environment, job.options) as device:
        return train(environment, device, link, job)


def train(environment: Environment, device: torch.device, link: Link, job: LightningJob) -> TrainingResult:
    """Train and test the module under Lightning's Trainer, as this rank of the process group; a collective.

    A training that has a checkpoint goes on from it. Rank 0 writes the final weights to job.model_path. The call also
    sets warning filters, log levels, torchrun's environment variables and the number of threads for the whole process.

    Args:
        environment: this rank.
        device: the device of this rank.
        link: receives the events.
        job: the training.

    Returns:
        What this rank knows of the result: the epochs, the test measures and the digest of the weights.

    Raises:
        InputError: something is wrong with the module, its data or callbacks, or with the settings.
        NonFiniteError: a loss or weight is not finite.
        RecoverableError: a host differs from the others, and options.odd_hosts is "refuse".
        StopRequested: the ranks were asked to stop, and have written a checkpoint.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no word on the accelerators that there are not
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")  # between it and torch
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # a lone rank is warned even where it is set
    warnings.filterwarnings("ignore", f"(?s){SAID_ELSEWHERE}")
    torch.set_num_threads(environment.threads)
    reopen_in_forks()  # the loaders' workers
    os.environ.update(_launcher_variables(environment))
    try:
        return _train(environment, device, link, job)
    except MisconfigurationException as error:
        raise InputError(f"Lightning cannot train {job.recipe}: {error}") from None


def _launcher_variables(environment: Environment) -> dict[str, str]:
    """Return torchrun's environment variables for this rank, which Lightning's TorchElasticEnvironment reads."""
    node = environment.rank // environment.world.local_size
    position = {"RANK": environment.rank, "LOCAL_RANK": environment.local_rank, "GROUP_RANK": node}
    sizes = {"WORLD_SIZE": environment.world.size, "LOCAL_WORLD_SIZE": environment.world.local_size}
    unused = {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}  # the process group exists
    return {name: str(value) for name, value in {**position, **sizes, **unused}.items()}


def _train(environment: Environment, device: torch.device, link: Link, job: LightningJob) -> TrainingResult:
    check_same_training(environment, job)
    seed(job)
    link.emit(StartUp("making the module and its data"))
    parts = build(job)
    module = parts.module
    files = CheckpointFiles(job, link.emit, device)
    validation = LoggedByValidation()
    loaders = Loaders(job.settings.seed, environment.rank, environment.world.size, lambda: observer.position)
    observer = RankObserver(environment, device, link, job, files, validation, loaders)
    seeds = StepSeeds(job.settings.seed, environment.rank, observer)
    for owner in parts.owners:
        loaders.adapt_methods(owner, partial(seed, job), seeds.begin_order)
    trainer = make_trainer(environment, device, job, files, validation, [*parts.callbacks, observer, seeds])
    loaders.adapt_trainer(trainer)
    settle_strategy_buckets(trainer.strategy)
    call_hooks_without_epochs(trainer)
    seed(job)
    path = files.find()
    if path:
        after_train_start(trainer, lambda: observer.after_train_start(trainer))
    try:
        trainer.fit(module, datamodule=parts.data, ckpt_path=path)
    except (RuntimeError, TypeError, ValueError) as error:
        if known := with_remedy(error):
            raise known from None
        raise
    if not observer.progress.started:  # Lightning skips a training without batches
        observer.start(trainer)
    seed(job)
    tested = test(trainer, parts, link, observer)
    link.heartbeat(WRITING)
    digest = weights_digest(module.state_dict(), device=device)
    if environment.rank == 0:
        with writing_to(Path(job.model_path).parent, "DDP_RUNS_DIR"):
            export_model(module.state_dict(), Path(job.model_path))
    return observer.progress.result(module, digest, tested, count_samples(trainer.test_dataloaders))


def seed(job: LightningJob) -> None:
    """Seed all generators by the setting seed, alike on all ranks, for weights and splits that are drawn next."""
    seed_everything(job.settings.seed, workers=True, verbose=False)


def make_trainer(
    environment: Environment,
    device: torch.device,
    job: LightningJob,
    files: CheckpointFiles,
    validation: LoggedByValidation,
    callbacks: list[Callback],
) -> Trainer:
    """Create Lightning's Trainer for this rank, and store it as validation.trainer, too.

    Args:
        environment: this rank and the number of ranks.
        device: this rank's device.
        job: the training, whose settings and options become the trainer's arguments.
        files: the plugin by which the trainer reads and writes checkpoints.
        validation: the trainer's logger.
        callbacks: all callbacks of the trainer.
    """
    settings, world = job.settings, environment.world
    limits: dict[str, Any] = {name: getattr(settings, name) for name in LIMITS}
    limits = {name: int(limit) if limit > 1 else limit for name, limit in limits.items()}  # a float is a share
    validation.trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=world.local_size,
        num_nodes=world.size // world.local_size,
        strategy=job.options.strategy,
        precision=PRECISIONS[settings.precision],  # type: ignore[arg-type]
        plugins=[TorchElasticEnvironment(), files],
        max_epochs=settings.epochs,
        gradient_clip_val=settings.gradient_clip_val or None,
        gradient_clip_algorithm=settings.gradient_clip_algorithm,
        **limits,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        sync_batchnorm=settings.sync_batchnorm,
        default_root_dir=os.path.realpath(job.logs),  # as ModelCheckpoint has folders that it is given
        logger=validation,
        log_every_n_steps=settings.log_interval,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return validation.trainer


def test(trainer: Trainer, parts: Parts, link: Link, observer: RankObserver) -> dict[str, float]:
    """Evaluate the module on its test split, with the weights of the last epoch, and emit EpochChosen; a collective.

    Nothing is evaluated or emitted if the module has no test_step, or if neither the module nor its data have
    test_dataloader. A measure other than a loss gets a warning if it is not finite.

    Returns:
        The measures by name; empty if nothing was evaluated.

    Raises:
        NonFiniteError: a test loss is not finite.
    """
    has_split = any(is_overridden("test_dataloader", one) for one in parts.owners)
    if not (has_split and is_overridden("test_step", parts.module)):
        return {}
    started = time.monotonic()
    progress = observer.progress
    epochs = len(progress.history)
    tested: dict[str, float] = {}
    for logged in trainer.test(parts.module, datamodule=parts.data, verbose=False):
        tested.update(read_measures(logged))
    not_finite = find_not_finite(tested)
    for name in not_finite.losses:
        raise NonFiniteError.in_evaluation(tested[name], "test", epochs)
    progress.emit_all(progress.monitor.warn_of_not_finite(not_finite.others, "test", epochs, 0))
    stopped_early = epochs < (trainer.max_epochs or 0)
    seconds = time.monotonic() - started
    link.emit(EpochChosen(epochs - 1, epochs, tested, stopped_early, seconds, is_best=False))
    return tested
