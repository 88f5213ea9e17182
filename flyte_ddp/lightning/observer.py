"""A callback that tells the parent what happens under Lightning, saves checkpoints and stops the ranks."""

import math
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import distributed

from flyte_ddp.engine.checks.data_probe import on_any_rank
from flyte_ddp.engine.digest import differ_between_ranks, weights_digest
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.own_loop.optimizers import LEFT_OUT
from flyte_ddp.engine.progress import Progress, StepFigures
from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.engine.stop_poll import StopPoll
from flyte_ddp.engine.torch_compat import norms, pytree
from flyte_ddp.errors import InputError, NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.lightning.checkpoint import CheckpointFiles
from flyte_ddp.lightning.epoch_state import EpochState, Window
from flyte_ddp.lightning.finite import broken, check_finite
from flyte_ddp.lightning.forgotten import begin_epoch_again, check_callbacks, forgotten, remember
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.lightning_compat import around_each_step
from flyte_ddp.lightning.loaders import Loaders, problems_of_ranks
from flyte_ddp.lightning.measures import LoggedByValidation, measures_of, problems_of_names
from flyte_ddp.lightning.remedies import check_schedules, problem_of_ranks
from flyte_ddp.lightning.requests import Requests
from flyte_ddp.lightning.results import plan_of
from flyte_ddp.random_numbers import Use, key_of

DRIFTED = (
    "the ranks have other weights than one another, and those of rank 0 are returned: DistributedDataParallel leaves "
    "out what is unfrozen later, as by BackboneFinetuning: train it from the start, with a learning rate of 0, or on "
    "one rank; change weights by hand alike on all ranks"
)
NOTHING = {"loss": 0.0, "weight": 0.0, "samples": 0.0, "seconds": 0.0, "evaluation": 0.0}


class RankObserver(Checkpoint):
    """Tells the parent what happens, saves checkpoints, and stops the ranks on request.

    Lightning calls a Checkpoint after all other callbacks.
    """

    def __init__(
        self,
        environment: Environment,
        device: torch.device,
        link: Link,
        job: LightningJob,
        files: CheckpointFiles,
        validation: LoggedByValidation,
        loaders: Loaders,
    ):
        self._environment, self._link, self._job = environment, link, job
        self._files, self._validation, self._loaders = files, validation, loaders
        monitor = LossMonitor(epochs=job.settings.epochs, remedies="lower the learning rate, or set gradient_clip_val")
        self.progress = Progress(device, link, monitor)
        self._so_far = dict(NOTHING)  # of this epoch
        self._within: dict[str, Any] = {}  # what a checkpoint within an epoch has of it
        self.position = 0, 0  # epoch and step of the last checkpoint
        self._norm = 0.0
        self._steps = 0  # of this epoch, that are done
        self._owes_checkpoint, self._is_first_step = False, True
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._is_compared = False
        self._forgotten: dict[str, Any] = {}  # see forgotten.py; of the checkpoint, empty without one

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress.state_dict(),
            "so_far": self._so_far,
            "forgotten": forgotten(self._trainer),
            "within": self._within,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        progress, ranks = self.progress, self._environment.world.size
        progress.load_state_dict(state_dict["progress"])
        before = progress.ran_on[-1]["ranks"] if progress.ran_on else ranks
        # On another number of ranks as many samples are done; at least a step is, as Lightning goes on within the epoch
        step = max(1, progress.step * before // ranks) if progress.step else 0
        self.position = progress.epoch, step
        self._so_far = dict(state_dict["so_far"])
        self._forgotten = state_dict["forgotten"]
        self._within = state_dict["within"]

    # --- before the steps ---

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Makes it the last one: its checkpoints have what the module's own Checkpoints have done after the epoch."""
        self._trainer = trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [*(one for one in callbacks if one is not self), self]  # type: ignore[attr-defined]
        check_callbacks(callbacks)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._keep_signal_handler()
        if self._forgotten:
            remember(trainer, self._forgotten)
        if self.position[1]:  # Lightning's own count, where a loader's state says how far it is
            self.position = self.position[0], trainer.fit_loop.epoch_loop.batch_idx + 1
        self._steps = self.position[1]
        self._epoch_state = EpochState(trainer, module)
        self._requests = Requests(trainer.strategy.root_device, self._job.options.checkpoint_seconds)
        around_each_step(trainer, lambda: self._between_steps(trainer, module), self._epoch_state.end_step)
        if trainer.num_training_batches == float("inf"):
            raise InputError(
                f"{self._job.datamodule or self._job.recipe}: train_dataloader has no length: set limit_train_batches "
                "to the number of batches that make an epoch"
            )
        self._files.check(trainer)
        self._saved = time.monotonic()
        self._looked = self._saved - self._within.get("seconds", 0.0)
        self.start(trainer)

    def start(self, trainer: Trainer) -> None:
        """Tell that the first step is next; a collective."""
        if not trainer.num_training_batches:  # Lightning ends at once then, without training
            raise InputError(
                f"{self._job.datamodule or self._job.recipe}: train_dataloader must have a batch for each rank: "
                "give it more samples, a smaller batch size, or drop_last=False"
            )
        progress = self.progress
        other_ranks = problem_of_ranks(progress.ran_on, self._environment.world.size)
        check_schedules(trainer, self.position[1], other_ranks)
        progress.epoch, progress.step = self.position
        progress.start(self._environment, self._job, plan_of(self._job, trainer), trainer.lightning_module)
        problems = [*filter(None, [other_ranks]), *self._loaders.problems]
        progress.warn(trainer.current_epoch, 0, problems)

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._keep_signal_handler()
        self._poll = StopPoll(trainer.strategy.root_device, lambda: self._tested <= self._least)
        # Not all ranks need have as many batches
        least = torch.tensor(float(min(trainer.num_test_batches, default=0)), device=trainer.strategy.root_device)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        self._tested, self._least = 0, 0.0 if math.isinf(least) else float(least)

    def _keep_signal_handler(self) -> None:
        """Lightning's own broadcasts, which hangs if not all ranks get the signal; in other threads it sets none."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._looked = time.monotonic()
        self.progress.clock.lap(StepPart.OTHER)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.progress.clock.lap(StepPart.DATA)
        self._epoch_state.begin_step()
        if not self._is_compared:
            self._is_compared = True
            self.progress.warn(trainer.current_epoch, 0, problems_of_ranks(batch, self._environment.world.size))
        steps = batch_idx + 1
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._rate = rates[0] if rates else 0.0  # now: a schedule sets that of the next step
        self._is_looking = steps % self._job.settings.log_interval == 0 or steps == trainer.num_training_batches

    # --- steps ---

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, _: torch.optim.Optimizer) -> None:
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        if self._is_looking and gradients:  # a look makes a GPU's host wait
            self._norm = float(norms(gradients).norm())

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._link.heartbeat()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # of each sample, perhaps, where the module optimizes by itself
        loss = None if loss is None else loss.detach().float().mean() * trainer.accumulate_grad_batches
        samples = _samples_in(batch)
        self._epoch_state.window.append((loss, samples))
        self.progress.clock.lap(StepPart.COMPUTING)
        self.progress.clock.samples += samples
        self.progress.clock.steps += 1
        self._steps = batch_idx + 1
        if self._is_looking:
            self._look(trainer, self._steps == trainer.num_training_batches)
            self.progress.clock.lap(StepPart.OTHER)

    def _look(self, trainer: Trainer, is_last: bool) -> None:
        """Tells what has happened since the last look; a collective, as is what may follow from it."""
        epoch, steps, now = trainer.current_epoch, self._steps, time.monotonic()
        seconds, self._looked = max(now - self._looked, 1e-9), now
        seen = self._seen(trainer, epoch, steps - 1)
        loss, samples = _mean(seen["loss"], seen["weight"]), seen["samples"]
        for name, value in {**seen, "seconds": seconds}.items():
            if name in self._so_far:
                self._so_far[name] += value
        progress = self.progress
        progress.epoch, progress.step = epoch, steps
        measures = {**self._validation.trained(), "loss": loss}
        figures = StepFigures(self._rate, self._norm)
        progress.log(measures, round(self._so_far["samples"]), round(samples), seconds, figures)
        self._requests.keep_pace(progress.time_ranks())
        if is_last:
            progress.tell_times()

    def _seen(self, trainer: Trainer, epoch: int, step: int) -> dict[str, float]:
        """The steps since the last look, summed over the ranks.

        Raises NonFiniteError, the same on all ranks.
        """
        window, self._epoch_state.window = self._epoch_state.window, []
        rank, size = self._environment.rank, self._environment.world.size
        local = {
            "loss": _total(window),
            "weight": sum(samples for loss, samples in window if loss is not None),
            "samples": sum(samples for _, samples in window),
        }
        is_finite = math.isfinite(local["loss"]) and not broken(self._validation.trained())[0]
        bad = [float(one == rank and not is_finite) for one in range(size)]
        numbers = torch.tensor([*local.values(), *bad], dtype=torch.float64, device=trainer.strategy.root_device)
        totals: list[float] = trainer.strategy.reduce(numbers, reduce_op="sum").tolist()
        ranks = [one for one, is_bad in enumerate(totals[len(local) :]) if is_bad]
        if ranks:
            raise NonFiniteError.in_step("loss", ranks, epoch, step)
        # float16 overflows now and then, and Lightning's scaler then skips the step
        if self._job.settings.precision != "float16" and not math.isfinite(self._norm):
            raise NonFiniteError.in_step("gradient", list(range(size)), epoch, step)
        return dict(zip(local, totals, strict=False))

    # --- between two steps ---

    def _between_steps(self, trainer: Trainer, module: LightningModule) -> None:
        """Save, and stop, if a rank asks for it; a collective. Raises StopRequested."""
        if self._is_first_step and self.position[1]:
            self._begin_epoch_again(trainer)
        self._is_first_step = False
        is_due = time.monotonic() - self._saved >= self._job.options.checkpoint_seconds
        asked = self._requests.exchange(self._link.stop_requested, is_due and self._environment.rank == 0)
        self.progress.clock.lap(StepPart.WAITING)
        epoch, steps = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx + 1
        is_saved = (epoch, steps) == self.position
        self._owes_checkpoint |= asked.stop or asked.save
        can_save = self._owes_checkpoint and not self._loaders.begins_epochs_anew and not is_saved
        if can_save and self._epoch_state.waits(steps):
            return
        if can_save:
            self._save_within(trainer, module, epoch, steps)
            self.progress.clock.lap(StepPart.OTHER)
        if asked.stop:
            raise StopRequested(epoch, steps)

    def _begin_epoch_again(self, trainer: Trainer) -> None:
        """Set up the epoch that a resume goes on with, as its beginning has; a collective."""
        seed_all(key_of(Use.LIGHTNING, self._job.settings.seed, self.position[0], 0))
        has_changed = begin_epoch_again(trainer, self)
        if self._within:
            self._epoch_state.restore(self._within["state"])
        self._within = {}
        self._epoch_state.keep_logged_now()
        if any(on_any_rank([has_changed], trainer.strategy.root_device)):
            self._files.restore_tensors(trainer)
        self.progress.clock.lap(StepPart.OTHER)

    def _save_within(self, trainer: Trainer, module: LightningModule, epoch: int, steps: int) -> None:
        """Save a checkpoint within an epoch; a collective. Raises NonFiniteError."""
        trained = {**self._validation.trained(), "loss": _total(self._epoch_state.window)}
        check_finite(trainer, module, trained, {}, epoch, steps)
        if self._epoch_state.gradients.has_given_up:
            self.progress.warn_once(LEFT_OUT)
        self._within = {"state": self._epoch_state.gather(), "seconds": time.monotonic() - self._looked}
        self._save(trainer, epoch, steps)

    # --- epochs ---

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._evaluating = time.monotonic()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._link.heartbeat()

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._link.heartbeat()
        self._tested += 1
        if self._poll.after_batch(self._link.stop_requested):
            raise StopRequested(self.progress.epoch, self.progress.step, is_evaluating=True)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        seconds = time.monotonic() - self._evaluating
        self._so_far["evaluation"] += seconds
        self._looked += seconds

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._epoch_state.window:  # the module, or a callback such as Timer, has ended the epoch early
            self._look(trainer, is_last=True)
        epoch, so_far, validation = trainer.current_epoch, self._so_far, measures_of(self._validation.values)
        loss = _mean(so_far["loss"], so_far["weight"])
        steps = int(trainer.num_training_batches)
        check_finite(trainer, module, self._validation.trained(), validation, epoch, steps)
        finished = EpochFinished(
            epoch=epoch,
            samples=round(so_far["samples"]),
            train={**self._validation.trained(), "loss": loss},
            test={},
            train_seconds=so_far["seconds"],
            evaluate_seconds=so_far["evaluation"],
            validation=validation,
            digest=weights_digest(module.state_dict(), device=trainer.strategy.root_device),
        )
        progress = self.progress
        progress.epoch, progress.step = epoch, steps
        progress.evaluated(finished, broken(validation)[1])
        if len(progress.history) == 1:
            has_batches = trainer.val_dataloaders is None or any(trainer.num_val_batches)
            names = {*finished.train}, validation, so_far["evaluation"] > 0, has_batches
            progress.warn(epoch, 0, problems_of_names(self._job.headline, *names))
        if differ_between_ranks(module.parameters(), trainer.strategy.root_device):
            progress.warn_once(DRIFTED)
        self._so_far, self._validation.values = dict(NOTHING), {}
        self._save(trainer, epoch + 1, 0)
        if any(on_any_rank([self._link.stop_requested], trainer.strategy.root_device)):
            raise StopRequested(epoch + 1, 0)

    def _save(self, trainer: Trainer, epoch: int, step: int) -> None:
        self.position = self._files.position = epoch, step
        self.progress.epoch, self.progress.step = epoch, step
        self._link.heartbeat(WRITING)
        started = time.monotonic()
        trainer.save_checkpoint(self._job.checkpoint_path)
        self._saved = time.monotonic()
        self._looked += self._saved - started
        self._owes_checkpoint, self._within = False, {}
        self._requests.forget()


def _mean(total: float, weight: float) -> float:
    """NaN where no step had a loss, as under a module's own optimization."""
    return total / weight if weight else math.nan


def _total(window: Window) -> float:
    """Return the sum of the losses, each times its samples."""
    losses = [loss * samples for loss, samples in window if loss is not None]
    return torch.stack(losses).sum().item() if losses else 0.0


def _samples_in(batch: Any) -> int:
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)
