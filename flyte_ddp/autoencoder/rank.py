"""One rank under Lightning's Trainer, in a process that our launcher has started."""

import logging
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from flyte_ddp.autoencoder import network as autoencoder
from flyte_ddp.autoencoder.checkpoint import checkpoint_files, usable_checkpoint
from flyte_ddp.autoencoder.job import PRECISIONS, AutoencoderJob, AutoencoderResult
from flyte_ddp.data import prepared
from flyte_ddp.engine.results import export_model, layers_of
from flyte_ddp.engine.torch_compat import norms
from flyte_ddp.engine.watch import Watch
from flyte_ddp.errors import NonFiniteError, StopRequested
from flyte_ddp.events import EpochLosses, RunStarted
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.storage import writing_to

WANDB_SECONDS = 15.0  # how long a run waits for W&B at its start, and again at its end
LOOK_STEPS = 10  # steps between two checks of the loss, which on a GPU make the host wait


def run(environment: Environment, link: Link, job: AutoencoderJob) -> AutoencoderResult:
    """Trains the autoencoder as this rank; rank 0 writes the weights and the test images' codes to the job's paths."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no word on the accelerators that there are not
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")  # between it and torch
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # which is set; a lone rank is warned all the same
    torch.set_num_threads(environment.threads)
    hp, world = job.hp, environment.world
    # Lightning finds the process group already initialised
    with (
        process_group(environment, job.options.timeout_seconds) as device,
        open_logger(job, environment) as logger,
    ):
        observer = Observer(environment, link, job)
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=world.local_size,
            num_nodes=world.size // world.local_size,
            strategy=job.options.strategy,
            precision=PRECISIONS[hp.precision],
            plugins=[SpawnedRanks(environment), checkpoint_files(job.key, link.emit)],
            max_epochs=hp.epochs,
            limit_train_batches=job.steps_per_epoch,
            logger=logger,
            log_every_n_steps=LOOK_STEPS,
            callbacks=[observer],
            use_distributed_sampler=False,  # batches are already shared out
            num_sanity_val_steps=0,
            enable_checkpointing=False,  # the observer does it
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        network = autoencoder.build_autoencoder(hp.seed)
        trainer.fit(
            autoencoder.lightning_module(network, hp.learning_rate),
            autoencoder.lightning_data(Path(job.data), hp.batch_size, hp.seed, environment, device),
            ckpt_path=usable_checkpoint(Path(job.checkpoint_path), job.key, link.emit),
        )
    test_loss = 0.0
    if environment.rank == 0:
        with writing_to(Path(job.model_path).parent, "DDP_RUNS_DIR"):
            export_model(network.state_dict(), Path(job.model_path))
            test_loss = autoencoder.encode_test_images(network.cpu(), Path(job.data), Path(job.encoded_path))
    return AutoencoderResult(
        observer.epochs, observer.steps, observer.watch.warnings, test_loss, type(trainer.strategy).__name__
    )


class SpawnedRanks(ClusterEnvironment):
    """Tells Lightning which rank this process is, and that all ranks have been started."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # not needed: the process group exists

    def __init__(self, environment: Environment):
        self._environment = environment

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self._environment.world.size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._environment.rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._environment.local_rank

    def node_rank(self) -> int:
        return self._environment.rank // self._environment.world.local_size


class Observer(Callback):
    """Sends events to the parent, stops the ranks on request, and keeps the losses and a checkpoint."""

    def __init__(self, environment: Environment, link: Link, job: AutoencoderJob) -> None:
        self._environment, self._link, self._job = environment, link, job
        self.epochs: list[EpochLosses] = []
        self.steps: list[tuple[float, float]] = []
        self.watch = Watch(0.0, remedies="lower learning_rate")
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def state_dict(self) -> dict[str, Any]:
        epochs = [asdict(epoch) for epoch in self.epochs]
        return {"epochs": epochs, "steps": self.steps, "watch": self.watch.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = [EpochLosses(**epoch) for epoch in state_dict["epochs"]]
        self.steps = state_dict["steps"]
        self.watch.load_state_dict(state_dict["watch"])

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning's own handler broadcasts, which hangs if not all ranks get the signal
        signal.signal(signal.SIGTERM, self.on_sigterm)
        self.watch.constant_loss = trainer.datamodule.constant_loss  # type: ignore[attr-defined]
        self._link.emit(run_started(self._environment, self._job, trainer.current_epoch))

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, _: torch.optim.Optimizer) -> None:
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        # float16 overflows now and then, and Lightning's scaler then skips the step
        if self._job.hp.precision != "float16" and not norms(gradients).isfinite().all():
            steps = trainer.fit_loop.epoch_loop.batch_idx
            raise NonFiniteError("gradient", list(range(self._environment.world.size)), trainer.current_epoch, steps)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._link.alive()
        steps = batch_idx + 1
        if steps % LOOK_STEPS and steps < self._job.steps_per_epoch:
            return
        loss = outputs["loss"].item()
        if not math.isfinite(loss):
            raise NonFiniteError("loss", [self._environment.rank], trainer.current_epoch, batch_idx)
        self.steps.append((trainer.current_epoch + steps / self._job.steps_per_epoch, loss))
        for warning in self.watch.after_steps(trainer.current_epoch, steps, loss, self._job.hp.batch_size):
            self._link.emit(warning)
        if trainer.strategy.reduce_boolean_decision(self._link.stop_requested, all=False):
            raise StopRequested(trainer.current_epoch, steps)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._link.alive()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        train, validation = metrics["train_loss_epoch"].item(), metrics["validation_loss"].item()
        seconds = time.perf_counter() - self.started
        self.epochs.append(EpochLosses(trainer.current_epoch, train, validation, seconds))
        self._link.emit(self.epochs[-1])
        for warning in self.watch.after_epoch(trainer.current_epoch, self._job.steps_per_epoch, validation):
            self._link.emit(warning)
        trainer.save_checkpoint(self._job.checkpoint_path)


def run_started(environment: Environment, job: AutoencoderJob, first_epoch: int) -> RunStarted:
    description, world = prepared.read_description(Path(job.data)), environment.world
    return RunStarted(
        dataset=description.name,
        samples="images",
        headline="loss",
        percent=(),
        train_samples=description.train_samples,
        test_samples=description.test_samples,
        samples_per_epoch=job.steps_per_epoch * job.hp.batch_size,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=job.hp.precision,
        epochs=job.hp.epochs,
        steps_per_epoch=job.steps_per_epoch,
        first_epoch=first_epoch,
        first_step=0,
        startup_seconds=time.time() - job.launched,
        layers=layers_of(autoencoder.Autoencoder()),
    )


@contextmanager
def open_logger(job: AutoencoderJob, environment: Environment) -> Iterator[Logger | bool]:
    """Lightning's logger for the job's tracking, on rank 0, else False; W&B's is dropped with a warning if it cannot
    start, and finished here, since the process will end without exit handlers."""
    if environment.rank or job.tracking == "off":
        yield False
        return
    if job.tracking == "tensorboard":
        tensorboard = TensorBoardLogger(job.logs, name="tensorboard", version="")
        tensorboard.log_hyperparams(asdict(job.hp))
        yield tensorboard
        return
    import wandb

    settings = wandb.Settings(console="off", silent=True, init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS)
    project = os.environ.get("WANDB_PROJECT") or "flyte-ddp"
    mode: Any = job.tracking
    try:
        run = wandb.init(
            project=project, name=job.name, dir=job.logs, config=asdict(job.hp), mode=mode, settings=settings
        )
    except Exception as error:  # of its own, and what the network raises
        print(f"Warning: no Weights & Biases: {type(error).__name__}: {error}")
        yield False
        return
    exit_code = 1
    try:
        yield WandbLogger(experiment=run)
        exit_code = 0
    finally:
        run.finish(exit_code)
