"""What goes on beside a training under Lightning: events to the parent, checkpoints and stops."""

import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from flyte_ddp.engine.digest import differ_between_ranks, weights_digest
from flyte_ddp.engine.hosts.machine import machine, moved
from flyte_ddp.engine.hosts.places import places_of_ranks
from flyte_ddp.engine.hosts.unlike import unlike
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepClock, StepPart
from flyte_ddp.engine.monitor.stragglers import Stragglers
from flyte_ddp.engine.torch_compat import norms, pytree
from flyte_ddp.errors import InputError, NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished, Event, RunStarted, StepLogged, digests_of
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.lightning.checkpoint import CheckpointFiles
from flyte_ddp.lightning.finite import broken, check_finite
from flyte_ddp.lightning.forgotten import check_callbacks, forgotten, remember
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.loaders import problems_of_ranks
from flyte_ddp.lightning.measures import LoggedByValidation, measures_of, problems_of_names
from flyte_ddp.lightning.remedies import problem_of_ranks
from flyte_ddp.lightning.results import run_started

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
        link: Link,
        job: LightningJob,
        files: CheckpointFiles,
        validation: LoggedByValidation,
    ):
        self._environment, self._link, self._job = environment, link, job
        self._files, self._validation = files, validation
        self.epochs: list[EpochFinished] = []
        self.ran_on: list[dict[str, Any]] = []  # see engine/hosts/machine.py
        self.loss_monitor = LossMonitor(
            epochs=job.settings.epochs, remedies="lower the learning rate, or set gradient_clip_val"
        )
        self._so_far = dict(NOTHING)  # of this epoch
        self._window: list[tuple[torch.Tensor | None, int]] = []  # loss and samples of each step since the last look
        self.position = 0, 0  # epoch and step that training begins with, or goes on with from a checkpoint
        self._norm, self._stopping = 0.0, False
        self._steps = 0  # of this epoch, that are done
        self.started: RunStarted | None = None
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._stragglers: Stragglers | None = None
        self._is_compared = False
        self._forgotten: dict[str, Any] = {}  # see forgotten.py; of the checkpoint, empty without one
        self.other_ranks = ""  # what is said if a checkpoint of another number of ranks was resumed from

    def state_dict(self) -> dict[str, Any]:
        epochs = [asdict(epoch) for epoch in self.epochs]
        so_far = {"so_far": self._so_far, "position": list(self.position), "forgotten": forgotten(self._trainer)}
        return {"epochs": epochs, "ran_on": self.ran_on, "watch": self.loss_monitor.state_dict(), **so_far}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = [EpochFinished(**epoch) for epoch in state_dict["epochs"]]
        self.loss_monitor.load_state_dict(state_dict["watch"])
        self.ran_on = state_dict.get("ran_on", [])
        self._so_far, self.position = dict(state_dict["so_far"]), tuple(state_dict["position"])
        self._forgotten = state_dict.get("forgotten", {})

    # --- before the steps ---

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Makes it the last one: its checkpoints have what the module's own Checkpoints have done after the epoch."""
        self._trainer = trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [*(one for one in callbacks if one is not self), self]  # type: ignore[attr-defined]
        check_callbacks(self._job.recipe, callbacks)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._clock = StepClock(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._keep_signal_handler()
        if self._forgotten:
            remember(trainer, self._forgotten, is_within_epoch=self.position[1] > 0)
        if trainer.num_training_batches == float("inf"):
            raise InputError(
                f"{self._job.datamodule or self._job.recipe}: train_dataloader has no length: set limit_train_batches "
                "to the number of batches that make an epoch"
            )
        self.loss_monitor.constant_loss = float(getattr(trainer.datamodule, "constant_loss", 0.0))  # type: ignore[attr-defined]
        loaders = pytree.tree_leaves(trainer.train_dataloader)
        self._is_resumable = all(hasattr(loader, "load_state_dict") for loader in loaders)
        self._files.check(trainer)
        self._saved = self._looked = time.monotonic()
        self.start(trainer)

    def start(self, trainer: Trainer) -> RunStarted:
        if not trainer.num_training_batches:  # Lightning ends at once then, without training
            raise InputError(
                f"{self._job.datamodule or self._job.recipe}: train_dataloader must have a batch for each rank: "
                "give it more samples, a smaller batch size, or drop_last=False"
            )
        places = places_of_ranks(self._environment, trainer.strategy.root_device, self._job, trainer.lightning_module)
        hosts = [place.host for place in places]
        remedy = "look at what its host reads from, or raise num_workers of the DataLoader"
        self._stragglers = Stragglers(hosts, remedy, meet_within=True)  # in the backward pass
        now = machine(places, self._job.settings.precision, self._job.options)
        if not getattr(trainer.datamodule, "is_same_on_any_ranks", False):  # type: ignore[attr-defined]
            self.other_ranks = problem_of_ranks(self.ran_on, now)
        self.ran_on, remarks = moved(self.ran_on, now)
        started = run_started(self._environment, self._job, trainer, *self.position, hosts)
        self.started = replace(
            started, remarks=started.remarks + remarks, ran_on=self.ran_on, earlier=digests_of(self.epochs)
        )
        self._link.emit(self.started)
        self._warn(trainer.current_epoch, [*unlike(places, self._job.options), *filter(None, [self.other_ranks])])
        return self.started

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._keep_signal_handler()

    def _keep_signal_handler(self) -> None:
        """Lightning's own broadcasts, which hangs if not all ranks get the signal; in other threads it sets none."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._looked = time.monotonic()
        self._clock.lap(StepPart.OTHER)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.lap(StepPart.DATA)
        if not self._is_compared:
            self._is_compared = True
            self._warn(trainer.current_epoch, problems_of_ranks(batch, self._environment.world.size))
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
        self._window.append((loss, _samples_in(batch)))
        self._clock.lap(StepPart.COMPUTING)
        self._clock.samples += self._window[-1][1]
        self._steps = batch_idx + 1
        if self._is_looking:
            self._look(trainer, self._steps == trainer.num_training_batches)
            self._clock.lap(StepPart.OTHER)

    def _look(self, trainer: Trainer, is_last: bool) -> None:
        """Tells what has happened since the last look; a collective, as is what may follow from it."""
        epoch, steps, now = trainer.current_epoch, self._steps, time.monotonic()
        seconds, self._looked = max(now - self._looked, 1e-9), now
        count, seen = len(self._window), self._seen(trainer, epoch, steps - 1)
        loss, samples, stops = _mean(seen["loss"], seen["weight"]), seen["samples"], seen["stops"] > 0
        for name, value in {**seen, "seconds": seconds}.items():
            if name in self._so_far:
                self._so_far[name] += value
        self._link.emit(
            StepLogged(
                epoch=epoch,
                step=steps,
                samples=round(self._so_far["samples"]),
                measures={**self._validation.trained(), "loss": loss},
                learning_rate=self._rate,
                samples_per_second=samples / seconds,
                gradient_norms={},
                gradient_norm=self._norm,
            )
        )
        if seen["weight"]:
            self._emit_all(self.loss_monitor.after_steps(epoch, steps, loss, round(samples)))
        self._time_ranks(epoch, steps, count, is_last)
        # gradients that are still being added up are in no checkpoint
        is_resumable = self._is_resumable and steps % trainer.accumulate_grad_batches == 0
        if not is_last and is_resumable and (stops or seen["due"]):
            self._save(trainer, epoch, steps)
        if not is_last and stops:
            raise StopRequested(epoch, steps)
        self._stopping = stops

    def _time_ranks(self, epoch: int, step: int, count: int, is_last: bool) -> None:
        assert self._stragglers
        slow = self._stragglers.after_steps(epoch, step, count, self._clock.read_all())
        self.loss_monitor.warnings += slow
        if slow or is_last:
            self._link.emit(self._stragglers.so_far())
        self._emit_all(slow)

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._link.emit(event)

    def _seen(self, trainer: Trainer, epoch: int, step: int) -> dict[str, float]:
        """The steps since the last look, and what is asked for, summed over the ranks.

        Raises NonFiniteError, the same on all ranks.
        """
        window, self._window, rank, size = self._window, [], self._environment.rank, self._environment.world.size
        losses = [loss * samples for loss, samples in window if loss is not None]
        local = {
            "loss": torch.stack(losses).sum().item() if losses else 0.0,
            "weight": sum(samples for loss, samples in window if loss is not None),
            "samples": sum(samples for _, samples in window),
            "stops": self._link.stop_requested,
            "due": rank == 0 and time.monotonic() - self._saved >= self._job.options.checkpoint_seconds,
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

    # --- epochs ---

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._evaluating = time.monotonic()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._link.heartbeat()

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._link.heartbeat()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        seconds = time.monotonic() - self._evaluating
        self._so_far["evaluation"] += seconds
        self._looked += seconds

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._window:  # the module, or a callback such as Timer, has ended the epoch before its last batch
            self._look(trainer, is_last=True)
        epoch, so_far, validation = trainer.current_epoch, self._so_far, measures_of(self._validation.values)
        loss = _mean(so_far["loss"], so_far["weight"])
        steps = int(trainer.num_training_batches)
        check_finite(trainer, module, self._validation.trained(), validation, epoch, steps)
        self.epochs.append(
            EpochFinished(
                epoch=epoch,
                samples=round(so_far["samples"]),
                train={**self._validation.trained(), "loss": loss},
                test={},
                train_seconds=so_far["seconds"],
                evaluate_seconds=so_far["evaluation"],
                validation=validation,
                digest=weights_digest(module.state_dict(), device=trainer.strategy.root_device),
            )
        )
        self._link.emit(self.epochs[-1])
        if len(self.epochs) == 1:
            trained = {*self.epochs[-1].train}
            has_batches = trainer.val_dataloaders is None or any(trainer.num_val_batches)
            names = trained, validation, so_far["evaluation"] > 0, has_batches
            self._warn(epoch, problems_of_names(self._job.headline, *names))
        warnings = self.loss_monitor.not_finite(broken(validation)[1], "validation", epoch + 1, steps)
        if "loss" in validation:
            warnings += self.loss_monitor.after_evaluation(self.epochs[-1], steps)
        self._emit_all(warnings)
        differ = differ_between_ranks(module.parameters(), trainer.strategy.root_device)
        if differ and all(warning.reason != DRIFTED for warning in self.loss_monitor.warnings):
            self._warn(epoch, [DRIFTED])
        self._so_far, self._validation.values = dict(NOTHING), {}
        self._save(trainer, epoch + 1, 0)
        if self._stopping:
            raise StopRequested(epoch + 1, 0)

    def _warn(self, epoch: int, problems: Sequence[str]) -> None:
        self._emit_all(self.loss_monitor.noted(epoch, 0, problems))

    def _save(self, trainer: Trainer, epoch: int, step: int) -> None:
        self.position = self._files.position = epoch, step
        self._link.heartbeat(WRITING)
        trainer.save_checkpoint(self._job.checkpoint_path)
        self._saved = self._looked = time.monotonic()


def _mean(total: float, weight: float) -> float:
    """NaN where no step had a loss, as under a module's own optimization."""
    return total / weight if weight else math.nan


def _samples_in(batch: Any) -> int:
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)
