"""A callback that tells the parent what happens under Lightning, saves checkpoints and stops the ranks."""

import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import distributed
from torch.utils.data import IterableDataset

from flyte_ddp.engine.collectives import all_reduce_flags, gather_values
from flyte_ddp.engine.contracts import Resumable, StepFigures, Training
from flyte_ddp.engine.digest import differ_between_ranks, weights_digest
from flyte_ddp.engine.measures import TOKENS
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.own_loop.last_step import LastStep
from flyte_ddp.engine.own_loop.optimizers import LEFT_OUT
from flyte_ddp.engine.progress import NOTHING, Progress
from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.engine.stop_poll import StopPoll
from flyte_ddp.engine.sums import Sums
from flyte_ddp.engine.torch_compat import norms, pytree
from flyte_ddp.errors import InputError, NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.lightning.callback_state import (
    begin_epoch_again,
    callback_state,
    check_callbacks,
    has_hook,
    restore_callbacks,
)
from flyte_ddp.lightning.checkpoint import CheckpointFiles
from flyte_ddp.lightning.epoch_state import EpochState
from flyte_ddp.lightning.finite import check_finite, find_not_finite
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.lightning_compat import (
    before_each_step,
    before_each_validation,
    begin_with_validation,
    checkpoint_now,
    set_steps_done,
)
from flyte_ddp.lightning.loaders import Loaders, warn_of_equal_batches
from flyte_ddp.lightning.measures import LoggedByValidation, find_unlogged_measures, read_measures
from flyte_ddp.lightning.remedies import check_schedules, describe_rank_change
from flyte_ddp.lightning.results import make_plan, samples_in
from flyte_ddp.random_numbers import Use, derive_key

DRIFTED = (
    "the ranks have other weights than one another, and those of rank 0 are returned: DistributedDataParallel leaves "
    "out what is unfrozen later, as by BackboneFinetuning: train it from the start, with a learning rate of 0, or on "
    "one rank; change weights by hand alike on all ranks"
)


class RankObserver(Checkpoint, Training):
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
        self.device = device
        self._environment, self._link, self._job = environment, link, job
        self._files, self._validation, self._loaders = files, validation, loaders
        monitor = LossMonitor(epochs=job.settings.epochs, remedies="lower the learning rate, or set gradient_clip_val")
        self.progress = Progress(device, link, monitor)
        self.progress.measure(["loss", "samples", TOKENS])
        self._evaluation_seconds = 0.0  # in this epoch
        self.within: dict[str, Any] = {}  # what a checkpoint within an epoch has besides
        self.position = 0, 0  # epoch and step of the last checkpoint
        self._rate = self._norm = 0.0
        self._last_step: LastStep | None = None  # on rank 0, while there is a validation
        self._can_leave = False  # the validation, because _last_step has what a checkpoint needs
        self._is_logged = self._is_bad_loss = False  # the current step; a loss that the module has logged by itself
        self._pairs = torch.zeros(6, dtype=torch.float64, device=device)  # what this rank measured in the last step
        self._asked = NOTHING
        self._is_first_step, self._has_stepped = True, False
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._is_compared = False
        self._forgotten: dict[str, Any] = {}  # what callback_state() returned; empty without a checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress.state_dict(),
            "evaluation_seconds": self._evaluation_seconds,
            "forgotten": callback_state(self._trainer),
            "within": self.within,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        progress, ranks = self.progress, self._environment.world.size
        progress.load_state_dict(state_dict["progress"])
        before = progress.ran_on[-1]["ranks"] if progress.ran_on else ranks
        # On another number of ranks as many samples are done; at least a step is, as Lightning goes on within the epoch
        step = max(1, progress.step * before // ranks) if progress.step else 0
        self.position = progress.epoch, step
        self._evaluation_seconds = state_dict["evaluation_seconds"]
        self._forgotten = state_dict["forgotten"]
        self.within = state_dict["within"]

    # --- before the steps ---

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Make this the last callback, as its checkpoints must have what the module's own Checkpoints have done."""
        self._trainer = trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [*(one for one in callbacks if one is not self), self]  # type: ignore[attr-defined]
        check_callbacks(callbacks)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._keep_signal_handler()
        if self._forgotten:
            restore_callbacks(trainer, self._forgotten)
        if self.within.get("is_trained"):  # also where this number of ranks has another number of steps
            set_steps_done(trainer, int(trainer.num_training_batches))
        if self.position[1]:  # Lightning's own count, where a loader's state says how far it is
            self.position = self.position[0], trainer.fit_loop.epoch_loop.batch_idx + 1
        self._epoch_state = EpochState(trainer, module, self._validation)
        before_each_step(trainer, lambda: self._between_steps(trainer, module))
        before_each_validation(trainer, lambda: self._keep_checkpoint_for_validation(trainer))
        if trainer.num_training_batches == float("inf"):
            raise InputError(
                f"{self._job.datamodule or self._job.recipe}: train_dataloader has no length: set limit_train_batches "
                "to the number of batches that make an epoch"
            )
        self._files.check(trainer)
        self.progress.checkpoints = Checkpoints(self, trainer, self._files, self._job, self._loaders)
        self.start(trainer)

    def start(self, trainer: Trainer) -> None:
        """Check the data and schedules, then start the progress, which emits RunStarted and warnings; a collective.

        Call this before the first step. If Lightning has skipped the training, call it before the test.

        Raises:
            InputError: this rank has no training batch; other ranks may not raise this. Or a resumed training has
                another number of ranks than before, so a learning rate schedule with total_steps would end before the
                training.
            RecoverableError: a host differs from the others, and options.odd_hosts is "refuse".
        """
        if not trainer.num_training_batches:  # Lightning ends at once then, without training
            raise InputError(
                f"{self._job.datamodule or self._job.recipe}: train_dataloader must have a batch for each rank: "
                "give it more samples, a smaller batch size, or drop_last=False"
            )
        progress = self.progress
        other_ranks = describe_rank_change(progress.ran_on, self._environment.world.size)
        check_schedules(trainer, self.position[1], other_ranks)
        progress.epoch, progress.step = self.position
        progress.start(self._environment, self._job, make_plan(self._job, trainer), trainer.lightning_module)
        problems = [*filter(None, [other_ranks]), *self._loaders.problems]
        progress.warn(trainer.current_epoch, 0, problems)

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._keep_signal_handler()
        self._begin_evaluation(trainer.num_test_batches, trainer.test_dataloaders)

    def _begin_evaluation(self, batches: Sequence[float], loaders: Any) -> None:
        """Prepare the ranks to agree during an evaluation on whether to stop; a collective.

        The ranks may have different numbers of batches. So they exchange requests to stop only during the first N
        batches of the evaluation, where N is the length of the shortest loader of any rank. The ranks exchange nothing
        if all loaders are infinite, or if a loader of any rank reads an IterableDataset, which may end before its
        stated length.

        Args:
            batches: the number of batches of each loader on this rank; may be infinite.
            loaders: the loaders, in any nesting.
        """
        datasets = [getattr(loader, "dataset", None) for loader in pytree.tree_leaves(loaders)]
        is_known = not any(isinstance(one, IterableDataset) for one in datasets)  # those may end before their length
        least = torch.tensor(float(min(batches, default=0)) if is_known else 0.0, device=self.device)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        self._evaluated, self._least = 0, 0.0 if math.isinf(least) else float(least)
        self._poll = StopPoll(self.device, lambda: self._evaluated <= self._least)

    def _after_evaluated_batch(self) -> bool:
        """Return whether the ranks leave the evaluation now; a collective."""
        self._link.heartbeat()
        self._evaluated += 1
        return self._poll.after_batch(self._link.stop_requested)

    def _keep_signal_handler(self) -> None:
        """Lightning's own broadcasts, which hangs if not all ranks get the signal; in other threads it sets none."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.progress.go_on()
        self.progress.clock.lap(StepPart.OTHER)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.progress.clock.lap(StepPart.DATA)
        self._epoch_state.begin_step()
        if not self._is_compared:
            self._is_compared = True
            self.progress.warn(trainer.current_epoch, 0, warn_of_equal_batches(batch))
        steps = batch_idx + 1
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._rate = rates[0] if rates else 0.0  # now: a schedule sets that of the next step
        self._is_logged = steps % self._job.settings.log_interval == 0 or steps == trainer.num_training_batches

    # --- steps ---

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, _: torch.optim.Optimizer) -> None:
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        if self._is_logged and gradients:  # a GPU's host waits for the norm
            self._norm = float(norms(gradients).norm())

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        progress, samples = self.progress, samples_in(batch)
        self._has_stepped = True
        progress.clock.lap(StepPart.COMPUTING)
        progress.clock.samples += samples
        progress.clock.steps += 1
        progress.epoch, progress.step = trainer.current_epoch, batch_idx + 1
        returned = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        loss = returned.get("loss")
        # Filled in place: a copy to a GPU would make the host wait
        pairs = torch.zeros(6, dtype=torch.float64, device=self.device)
        pairs[2] = samples
        tokens = returned.get(TOKENS)
        if isinstance(tokens, (int, float)) or (isinstance(tokens, torch.Tensor) and tokens.numel() == 1):
            pairs[4] = tokens
        if loss is not None:
            # Lightning divides the loss by accumulate_grad_batches; a module's own optimization may give one by sample
            pairs[0] = loss.detach().double().mean() * trainer.accumulate_grad_batches * samples
            pairs[1] = samples
        self._is_bad_loss = self._is_logged and bool(find_not_finite(self._validation.trained()).losses)
        # float16 overflows now and then, and Lightning's scaler skips the step then
        is_bad_norm = self._job.settings.precision != "float16" and not math.isfinite(self._norm)
        if self._is_bad_loss or is_bad_norm:
            pairs[2] = math.nan
        self._pairs = pairs
        progress.add_up(pairs)
        self._asked = progress.end_step(self, self._is_logged)
        progress.clock.lap(StepPart.OTHER)

    def measures(self, pairs: Sequence[float]) -> dict[str, float]:
        """Return the loss, and what training steps have logged last; the loss is NaN where no step had one."""
        loss, weight, *_ = pairs
        return {**self._validation.trained(), "loss": loss / weight if weight else math.nan}

    def samples(self, sums: Sums) -> int:
        return round(sums.pairs[2])

    def figures(self) -> StepFigures:
        """Return the last step's learning rate and norm of gradients."""
        return StepFigures(self._rate, self._norm)

    def step_error(self, step: int) -> NonFiniteError:
        """Return an error that names what was not finite, and on which ranks; a collective."""
        ranks = range(self._environment.world.size)
        is_bad = gather_values(self._is_bad_loss or not bool(self._pairs[0].isfinite()))
        bad = [rank for rank in ranks if is_bad[rank]]
        return NonFiniteError.in_step("loss" if bad else "gradient", bad or [*ranks], self.progress.epoch, step)

    def must_wait(self) -> bool:
        """Return whether a checkpoint has to wait for gradients; a collective."""
        return not self._loaders.begins_epochs_anew and self._epoch_state.waits(self.progress.step)

    def compare_between_ranks(self) -> None:
        """Warn of weights that differ between ranks; a collective."""
        if differ_between_ranks(self._trainer.lightning_module.parameters(), self.device):
            self.progress.warn_once(DRIFTED)

    # --- between two steps ---

    def _between_steps(self, trainer: Trainer, module: LightningModule) -> None:
        """Save a checkpoint, and stop, if a rank has asked for it; a collective.

        The trainer calls this method before each step. Before the first step after a resume, the method does more:

        - Within an epoch, it repeats what happens at the epoch's start.
        - In a later epoch than the first, it starts new loader workers if a hook may have changed the Dataset.

        Raises:
            StopRequested: A rank was asked to stop; the checkpoint was written.
        """
        if self._is_first_step:
            self._is_first_step = False
            if self.position[1]:
                self._begin_epoch_again(trainer)
            # In a later epoch of an undisturbed training, workers begin after these hooks, and copy what they have set
            if self.position[0] and has_hook(trainer, "on_train_start", "on_train_epoch_start"):
                self._loaders.begin_again(trainer)
        self.progress.save_or_stop(self, self._asked)
        self._asked = NOTHING

    def gather_within(self) -> None:
        """Store in self.within what a checkpoint within the epoch needs besides Lightning's state; a collective.

        The last loss and the weights are checked first. A warning is emitted once if gradients are left out, because
        their optimizer has not stepped for too long.

        Raises:
            NonFiniteError: a loss or weight is not finite; on all ranks.
        """
        progress, trainer = self.progress, self._trainer
        trained = self._validation.trained()
        check_finite(trainer.lightning_module, trained, {}, progress.epoch, progress.step)
        if self._epoch_state.gradients.has_given_up:
            progress.warn_once(LEFT_OUT)
        is_trained = progress.step >= trainer.num_training_batches
        self.within = {**self._epoch_state.gather(), "is_trained": is_trained}

    def _begin_epoch_again(self, trainer: Trainer) -> None:
        """Repeat what happens at an epoch's start, because the training resumes within the epoch; a collective.

        The method seeds the generators as at the epoch's start, calls the hooks on_train_epoch_start, and restores the
        gradients, logs and metrics that the checkpoint has. If a hook changed weights, buffers or optimizers on any
        rank, all ranks restore weights, buffers and optimizers from the checkpoint.
        """
        seed_all(derive_key(Use.LIGHTNING, self._job.settings.seed, self.position[0], 0))
        has_changed = begin_epoch_again(trainer, self)
        if self.within:
            self._epoch_state.restore(self.within)
        self.within = {}
        if any(all_reduce_flags([has_changed], trainer.strategy.root_device)):
            self._files.restore_tensors(trainer)
        self.progress.clock.lap(StepPart.OTHER)

    def after_train_start(self, trainer: Trainer) -> None:
        """After a resume, restore weights, buffers and optimizers from the checkpoint if hooks may have changed them.

        The hooks are on_fit_start and on_train_start of the module and of the user's callbacks. This is a collective.
        """
        if has_hook(trainer, "on_fit_start", "on_train_start"):
            self._files.restore_tensors(trainer)

    # --- epochs ---

    def _keep_checkpoint_for_validation(self, trainer: Trainer) -> None:
        """Keep a checkpoint on rank 0, so that a request to stop can end the validation that comes next; a collective.

        The checkpoint is kept in memory. Without it the ranks go through the whole validation before they stop. No
        checkpoint is kept in these cases:

        - A loader cannot resume within an epoch.
        - The checkpoint has to wait for an optimizer's step.
        - The epoch's end needs something that the checkpoint would lack, such as a metric's list.
        - A hook of the user's code fails on any rank while the checkpoint is made.

        Raises:
            NonFiniteError: A loss or weight is not finite. All ranks raise it. In the first three cases nothing is
                checked.
        """
        self._last_step = None
        self._begin_evaluation(trainer.num_val_batches, trainer.val_dataloaders)
        self._can_leave = not (
            self._loaders.begins_epochs_anew or self.must_wait() or self._cannot_resume_at_validation(trainer)
        )
        if not self._can_leave:
            return
        self.gather_within()
        content: dict[str, Any] = {}
        with suppress(Exception):  # a hook of the user's may need what the validation leaves
            content = checkpoint_now(trainer)
        self.within = {}
        self._can_leave = not any(all_reduce_flags([not content], self.device))
        if not self._can_leave:
            return
        begin_with_validation(content)
        buffers = {name for name, _ in trainer.lightning_module.named_buffers(remove_duplicate=False)}
        if trainer.is_global_zero:
            self._last_step = LastStep(
                content,
                self.progress,
                self.device,
                lambda keys: keys[0] == "callbacks" or (keys[0] == "state_dict" and keys[1] in buffers),
            )

    def _cannot_resume_at_validation(self, trainer: Trainer) -> bool:
        """Return whether the epoch's end needs more than a checkpoint before the validation could hold; a collective.

        All ranks return True if, on any rank, a callback has ended the training in a step, a metric keeps lists, or the
        module or a user's callback has on_train_epoch_end.
        """
        needs = trainer.should_stop or self._epoch_state.has_lists() or has_hook(trainer, "on_train_epoch_end")
        return any(all_reduce_flags([needs], self.device))

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._evaluating = time.monotonic()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._after_evaluated_batch() and self._can_leave:
            self._leave_validation(trainer)

    def _leave_validation(self, trainer: Trainer) -> None:
        """Write the checkpoint that rank 0 has kept since before the validation, and raise StopRequested; a collective.

        Rank 0 can't write it if the content could not be copied, or if the user's code has changed rank 0's weights
        since. Then all ranks return, and no request to stop can end this validation any more.
        """
        last, position = self._last_step, (self.progress.epoch, self.progress.step)
        self._can_leave = trainer.strategy.broadcast(last is not None and last.is_whole())
        if not self._can_leave:
            return
        self.compare_between_ranks()
        self._link.heartbeat(WRITING)
        if last:
            self._files.position = position
            self._files.save_checkpoint(last.state_dict(), self._job.checkpoint_path)
        trainer.strategy.barrier()
        raise StopRequested(*position, is_evaluating=True)

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._after_evaluated_batch():
            raise StopRequested(self.progress.epoch, self.progress.step, is_evaluating=True)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._evaluation_seconds += time.monotonic() - self._evaluating
        self._last_step, self._can_leave = None, False  # the next steps need the memory
        self.progress.go_on()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        progress, validation = self.progress, read_measures(self._validation.values)
        # The module, or a callback such as Timer, has ended the epoch early
        if self._has_stepped and not progress.is_logged:
            progress.end_step(self, is_logged=True)
        epoch, steps = trainer.current_epoch, int(trainer.num_training_batches)
        check_finite(module, self._validation.trained(), validation, epoch, steps)
        progress.epoch, progress.step = epoch, steps
        finished = EpochFinished(
            epoch=epoch,
            samples=self.samples(progress.last),
            train=self.measures(progress.last.pairs),
            test={},
            train_seconds=progress.seconds,
            evaluate_seconds=self._evaluation_seconds,
            validation=validation,
            digest=weights_digest(module.state_dict(), device=self.device),
        )
        progress.evaluated(finished, find_not_finite(validation).others)
        if len(progress.history) == 1:
            has_batches = trainer.val_dataloaders is None or any(trainer.num_val_batches)
            names = {*finished.train}, validation, self._evaluation_seconds > 0, has_batches
            progress.warn(epoch, 0, find_unlogged_measures(self._job.headline, *names))
        self.compare_between_ranks()
        progress.begin_next(1.0)
        self._evaluation_seconds, self._validation.values, self._asked = 0.0, {}, NOTHING
        progress.save(self)
        if any(all_reduce_flags([self._link.stop_requested], self.device)):
            raise StopRequested(epoch + 1, 0)


class Checkpoints:
    """A writer of an observer's checkpoints, whose content Lightning gathers."""

    def __init__(
        self, observer: RankObserver, trainer: Trainer, files: CheckpointFiles, job: LightningJob, loaders: Loaders
    ):
        self._observer, self._trainer, self._files, self._loaders = observer, trainer, files, loaders
        self._path, self._seconds = job.checkpoint_path, job.options.checkpoint_seconds
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return whether rank 0 wants a checkpoint now; False where a resume could not begin within an epoch."""
        is_asking = self._trainer.is_global_zero and not self._loaders.begins_epochs_anew
        return is_asking and time.monotonic() - self._last >= self._seconds

    def save(self, training: Resumable, is_last: bool = False) -> None:
        """Write a checkpoint of the training as it is now; a collective. Rank 0 writes the file.

        Nothing is written within an epoch if a loader cannot resume within an epoch.

        Args:
            training: the training; only its progress is used.
            is_last: has no effect.

        Raises:
            NonFiniteError: within an epoch, a loss or weight is not finite. All ranks raise this.
        """
        progress = training.progress
        if progress.step and self._loaders.begins_epochs_anew:
            return
        self._files.position = self._observer.position = progress.epoch, progress.step
        if progress.step:
            self._observer.gather_within()
        self._trainer.save_checkpoint(self._path)
        self._observer.within = {}
        progress.go_on()
        self._last = time.monotonic()

    def close(self) -> None:
        """Do nothing, as save() has waited for the file."""
