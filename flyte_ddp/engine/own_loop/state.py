"""The state of a loop of the user's own: how far it is, and how its steps, evaluations and epochs end."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.best_models import BestModels
from flyte_ddp.engine.buffers import Buffers
from flyte_ddp.engine.checkpoints.writer import make_whole_checkpoints
from flyte_ddp.engine.collectives import all_reduce_flags, broadcast_value, gather_values
from flyte_ddp.engine.contracts import Plan, StepFigures, Training
from flyte_ddp.engine.digest import differ_between_ranks, weights_digest
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.monitor.best_tracker import BestTracker
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.monitor.trace import Trace, make_trace
from flyte_ddp.engine.own_loop.agreement import Call, agree, names_on_all_ranks
from flyte_ddp.engine.own_loop.kept_parts import KeptParts
from flyte_ddp.engine.own_loop.last_step import LastStep
from flyte_ddp.engine.own_loop.optimizers import LEFT_OUT, list_weights
from flyte_ddp.engine.own_loop.parts import ExactGradients
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.results import export_model
from flyte_ddp.engine.sums import Sums
from flyte_ddp.engine.torch_compat import norms
from flyte_ddp.engine.virtual_ranks.rules import uneven_parts
from flyte_ddp.errors import InputError, NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished, Event, forward_to_all
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.model_files.frozen_base import add_module_versions
from flyte_ddp.random_numbers import Use, derive_key

DRIFTED = (
    "the ranks have other weights than one another, and those of rank 0 are returned: change them alike on all ranks, "
    "by gradients of what loop.wrap has returned, or from the same random numbers"
)
OUTDATED = (
    "an epoch has ended with other weights than those that its measures are of: call loop.evaluated after the epoch's "
    "last step"
)
HIGHEST, LOWEST = "highest", "lowest"


class LoopState(Training):
    """The state of a loop of the user's own, alike on all ranks but for what the current step has logged.

    Attributes:
        progress: how far the training is.
        parts: what changes while it trains.
        optimizers: those among the parts.
        wrapped: the networks that the ranks train together.
        exact: with virtual ranks, what adds their gradients up.
        audit: what computes parts of their batches twice.
        trace: what writes digests of steps; None without options.trace_every.
        batches, steps: of an epoch; None and 0 before they are known.
        trains_on: what the steps of the current epoch come from; None before the first of this attempt.
        logged: the measures of the current step; empty before and after it.
        evaluated: the measures of the current epoch's evaluation.
        evaluated_at: the step after which they were measured; -1 before.
        part: of the batch that loop.evaluation has given; None outside of it.
        is_cut: whether the last evaluation was left before its end.
        measured: by name (parts, 2) float64, the sums and weights that loop.measured was given for each part.
        is_stepping: whether the user's code is in a step.
        step_seed: the seed of the current step.
        backward_calls: how many times the current step has called Loop.backward.
        evaluation_sizes: numbers of samples of the splits that loop.evaluation was given, in their order.
        is_over: whether loop.epochs has come to its end.
        tested: the measures of an evaluation after that.
    """

    def __init__(self, environment: Environment, device: torch.device, link: Link, job: Job):
        self.device = device
        monitor = LossMonitor(remedies="lower the learning rate, or clip gradients")
        self.progress = Progress(device, link, monitor)
        self.best_tracker: BestTracker | None = None  # None where the last epoch is returned
        self.best_models: BestModels | None = None  # None without keep_best
        self.is_over = False
        self.tested: dict[str, float] = {}
        self.parts = KeptParts(device)
        self.optimizers = self.parts.optimizers
        self.wrapped: list[nn.Module] = []
        self.buffers: list[Buffers] = []  # of the wrapped networks
        self.exact: ExactGradients | None = None
        self.audit: Audit | None = None
        self.trace: Trace | None = None
        self.batches: TrainBatches | None = None
        self.steps = 0
        self.evaluation_sizes: list[int] = []
        self.trains_on: object = None
        self.is_stepping = False
        self.step_seed = self.backward_calls = 0
        self.logged = dict[str, Tensor]()
        self.evaluated: dict[str, float] = {}
        self.evaluated_at = -1
        self.part: int | None = None
        self.measured: dict[str, Tensor] = {}
        self.is_cut = False
        self._environment, self._link, self._job = environment, link, job
        self._rate = self._norm = 0.0
        self._can_leave = True  # an evaluation, because there is nothing to save, or because _last_step has it
        self._last_step: LastStep | None = None  # on rank 0
        self._own = torch.zeros(0, dtype=torch.float64, device=device)  # what this rank logged last
        self._choice: Mapping[str, Any] | None = None  # of the checkpoint that was resumed
        self._resumed: Mapping[str, Any] | None = None  # a checkpoint's state, within an epoch whose steps are to come

    def start(self, headline: str, percent: tuple[str, ...], precision: str, best: str) -> None:
        """Start the training before its first step, and emit RunStarted; a collective.

        This sets what the steps need: trace, progress.checkpoints, best_tracker (with `best`), best_models (with
        options.keep_best) and audit (with virtual ranks). In a resumed run, best_tracker continues from the checkpoint.

        Args:
            headline: the name of the main measure.
            percent: the names of the measures that are shown in per cent.
            precision: "float32" or "bfloat16", to be shown.
            best: which headline is the best, "highest" or "lowest"; "" if there is no validation split.

        Raises:
            InputError: It is the second call. Or loop.batches or loop.keep has not been called.
            RecoverableError: A host differs from the others, and options.odd_hosts is "refuse".
        """
        if self.progress.started:
            raise InputError(
                "loop.epochs must be called once, since its epochs have one checkpoint and one best epoch, got another "
                "call: give one loop all epochs, with `if epoch >= …:` for what a later phase changes"
            )
        is_chosen = bool(best)
        if not self.batches or not self.parts:
            missing = "loop.keep" if self.batches else "loop.batches"
            raise InputError(f"call {missing} before loop.epochs: a checkpoint could not be resumed without")
        settings, ranks = self._job.settings, self._environment.world.size
        plan = Plan(
            headline=headline,
            percent=percent,
            precision=precision,
            epochs=settings.epochs,
            steps_per_epoch=self.steps,
            samples_per_epoch=self.steps * settings.batch_size,
            train_samples=len(self.batches.split),
            validation_samples=sum(self.evaluation_sizes[:1]) if is_chosen else 0,
            test_samples=sum(self.evaluation_sizes[1:] if is_chosen else self.evaluation_sizes),
            may_end_early=settings.patience > 0,
            remarks=["trained by a loop of your own", *uneven_parts(settings.virtual_ranks, ranks)],
            slow_data=self.batches.split.remedy,
            meets_within=True,  # in the backward pass
        )
        progress = self.progress
        progress.start(self._environment, self._job, plan, self.parts["model"])
        emit: Callable[[Event], None] = self._link.emit
        if is_chosen:
            self.best_tracker = BestTracker(headline, best == LOWEST, settings.patience, settings.minimum_delta)
            if self._choice:
                self.best_tracker.load_state_dict(self._choice)
        if self._job.options.keep_best:
            self.best_models = BestModels(self, self._job, emit, self._write)
            emit = forward_to_all(self.best_models, emit)
        progress.checkpoints = make_whole_checkpoints(self._environment, emit, self._job)
        is_resumed = progress.epoch + progress.step > 0
        self.trace = make_trace(self._environment, self.device, self._job, is_resumed)
        if self.exact:
            self.exact.trace = self.trace
            self.exact.watch(self.parts.networks())
            every = self._job.options.audit_every
            self.audit = audit = Audit(self.exact.parallel, self.batches, every, progress.places, progress.warn)
            self.exact.add_up = lambda backward, shares, call: audit.add_up_gradients(
                backward, shares, progress.epoch, progress.step, call
            )

    @property
    def steps_done(self) -> int:
        """Return how many of the epoch's steps are done, with one that has logged and that `break` has left."""
        return self.progress.step + (bool(self.logged) and not self.is_stepping)

    def share_buffers(self) -> None:
        """Overwrite the buffers of the wrapped networks, on all ranks, with rank 0's; a collective."""
        for buffers in self.buffers:
            buffers.broadcast(may_change_shape=True)

    def agree(self, call: Call) -> None:
        """Raise InputError if another rank does something else here; a collective."""
        agree(call, self.progress.epoch, self.progress.step, self.device)

    def all_evaluate(self) -> bool:
        """Return whether no rank has left the evaluation that this one is in; a collective."""
        return agree(Call.BATCH, self.progress.epoch, self.progress.step, self.device)

    def begin_step(self, shares: Sequence[Batch]) -> None:
        """Prepare for a step, right before the user's code gets the step's batch.

        This sets step_seed, is_stepping and backward_calls, stores the learning rate for the log, and begins the step's
        trace. It drops the state that end_step() has kept for a stop in the evaluation.

        Args:
            shares: this rank's samples of the step; with virtual ranks a batch for each of its parts, otherwise one.
        """
        self.is_stepping = True
        self._can_leave, self._last_step = False, None
        progress = self.progress
        self.step_seed = derive_key(Use.OWN_STEP, self._job.settings.seed, progress.epoch, progress.step)
        self.backward_calls = 0
        self.optimizers.begin_step()
        groups = [group for part in self.parts.values() for group in getattr(part, "param_groups", ())]
        self._rate, self._norm = float(groups[0]["lr"]) if groups else 0.0, 0.0
        if self.trace:
            self.trace.begin(self.parts.networks(), progress.epoch, progress.step, self.steps)
            if not self.exact:  # otherwise loop.backward begins each part
                self.trace.begin_part(self._environment.rank, shares[0].tree)

    def before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Check that an optimizer may step. In a step that is logged, also store the norm of the model's gradients.

        torch calls it as a hook before each step of any optimizer. The norm is that of all gradients of loop.keep's
        model, whichever optimizer steps. Storing it makes the host wait for the device.

        Args:
            optimizer: the optimizer that is about to step.
            *_: torch's further arguments, which are ignored.

        Raises:
            InputError: loop.keep was not given the optimizer, or the optimizer steps outside of a loop over
                loop.batches. Or, with virtual ranks, one of its weights with a gradient is not in the wrapped network.
        """
        if not self.optimizers.have(optimizer):
            kind = type(optimizer).__name__
            raise InputError(f"loop.keep must have the {kind} that steps: a resume would begin with a new one")
        if self.exact:
            self.exact.check_optimizer(optimizer)
        if not self.is_stepping:
            raise InputError("an optimizer must step within `for … in loop.batches`: elsewhere each rank is by itself")
        gradients = [weight.grad for weight in self.parts["model"].parameters() if weight.grad is not None]
        if self.trace and not self.exact:  # otherwise loop.backward has recorded them, before they were clipped
            self.trace.record_gradients(list_weights([optimizer]))
        if self._is_logged and gradients:
            self._norm = float(norms(gradients).norm())

    def must_wait(self) -> bool:
        """Return whether a checkpoint has to wait for gradients; a collective."""
        waits = self.parts.pending.wait()
        if self.parts.pending.has_given_up:
            self.progress.warn_once(LEFT_OUT)
        return waits

    def end_step(self, is_left: bool = False) -> None:
        """End a step: sum its logged measures over all ranks, log, and obey requests to save or stop; a collective.

        The loop calls this when the user's code asks for the next batch or has left the loop. A log line
        comes every settings.log_interval steps, and at the epoch's end. progress.step grows by 1. Without virtual
        ranks, all ranks get rank 0's buffers. After an epoch's last step, the state is kept for a stop during the
        evaluation.

        Args:
            is_left: whether the user's code has left the loop over the batches at this step. Then requests to save or
                stop wait for the end of the epoch, because a resume would continue within the epoch.

        Raises:
            InputError: The step has logged nothing, loop.measured was called without loop.evaluated after it, or ranks
                do different things.
            StopRequested: A rank was asked to stop; a checkpoint was written.
            NonFiniteError: A measure of this or an earlier step is not finite. Or a weight is not finite when a
                checkpoint is due, which is not written then.
        """
        progress = self.progress
        progress.clock.lap(StepPart.COMPUTING)
        if not self.logged:
            raise InputError("call loop.log(loss=...) once in each step")
        if self.measured:
            raise InputError(
                "loop.evaluated must be called after an evaluation, before a step ends, as a checkpoint has no sums of "
                "loop.measured: call it where the evaluation ends"
            )
        self.agree(Call.STEP_END)
        if not self.exact:  # otherwise loop.backward has done so
            self.share_buffers()
        if self.trace:
            self.trace.end_part(self.logged["loss"])
            self.trace.end()
        if not progress.names:
            progress.measure(names_on_all_ranks("loop.log", gather_values([*self.logged])))
        self._own = torch.stack([self.logged[name] for name in progress.names])
        is_logged = self._is_logged
        progress.add_up(torch.stack([self._own, torch.ones_like(self._own)], 1).flatten())
        self.logged, self.is_stepping = {}, False
        progress.step += 1
        asked = progress.end_step(self, is_logged)
        if is_left:
            return
        is_last = progress.step == self.steps
        progress.save_or_stop(self, asked, is_evaluation_next=is_last)
        if is_last and not progress.owes_checkpoint and not self.must_wait():
            self._can_leave = True
            if self._environment.rank == 0:
                buffers = self.parts.buffer_places()
                self._last_step = LastStep(
                    self.state_dict(), progress, self.device, lambda keys: keys in buffers or keys[0] == "progress"
                )

    def leave_evaluation(self) -> None:
        """Save the state after the last training step, and stop in the middle of an evaluation; a collective.

        Call it once all ranks have agreed to stop. If the state cannot be saved, the method returns, and the evaluation
        must go on. This is so if that step was not its epoch's last, if the user's code has changed a weight since, or
        if a checkpoint has to wait for gradients. Rank 0 decides for all ranks.

        Raises:
            StopRequested: The training stops. A checkpoint was written, unless the last one has this state already.
            NonFiniteError: A weight is not finite; no checkpoint was written.
        """
        progress, last = self.progress, self._last_step
        is_possible = self._can_leave and (last is None or last.is_whole())
        if not broadcast_value(is_possible):
            return
        self.compare_between_ranks()
        if last:
            progress.save(last, is_last=True)
        raise StopRequested(progress.epoch, progress.step, is_evaluating=True)

    def measures(self, pairs: Sequence[float]) -> dict[str, float]:
        """Return the mean of each measure that was logged."""
        sums_and_weights = zip(self.progress.names, pairs[::2], pairs[1::2], strict=True)
        return {name: value / weight for name, value, weight in sums_and_weights if weight}

    def samples(self, sums: Sums) -> int:
        return sums.steps * self._job.settings.batch_size

    def figures(self) -> StepFigures:
        """Return the last step's learning rate and norm of gradients."""
        return StepFigures(self._rate, self._norm)

    def step_error(self, step: int) -> NonFiniteError:
        """Return an error that names the ranks whose latest measures are not finite; a collective."""
        ranks = range(self._environment.world.size)
        is_bad = gather_values(not bool(self._own.isfinite().all()))
        bad = [rank for rank in ranks if is_bad[rank]] or [*ranks]
        return NonFiniteError.in_step("loss", bad, self.progress.epoch, step)

    def compare_between_ranks(self) -> None:
        """Check that trained weights are finite, and warn if weights differ between ranks; a collective.

        Buffers are not looked at.

        Raises:
            NonFiniteError: A trained weight is not finite. All ranks raise it.
        """
        own = chain(*(network.parameters() for network in self.wrapped), self.optimizers.weights())
        weights = {id(weight): weight for weight in own}.values()
        is_bad = gather_values(not all(bool(one.isfinite().all()) for one in weights if one.requires_grad))
        bad = [rank for rank, flag in enumerate(is_bad) if flag]
        if bad:
            raise NonFiniteError.in_step("a weight", bad, self.progress.epoch, self.progress.step - 1)
        if differ_between_ranks(weights, self.device):
            self.progress.warn_once(DRIFTED)

    def end_epoch(self, is_left: bool = False) -> None:
        """Record the epoch's evaluation, write a checkpoint, and go on to the next epoch; a collective.

        If the user's code has left the loop over the batches after loop.log, the step under way is ended first. With
        loop.epochs(best=...), the best weights so far are copied. With options.keep_best, weights among the best are
        written to a file. There is a warning if weights differ between ranks, or if steps after the evaluation have
        changed them.

        While unapplied gradients differ between ranks, the checkpoint and a stop are put off: end_step() does both in a
        later step. After the last epoch the checkpoint is written all the same.

        Args:
            is_left: whether the user's code has left the loop over the epochs. Then a requested stop is not obeyed,
                because the training ends anyway.

        Raises:
            InputError: loop.evaluated was not called in this epoch, or it lacks the headline. With
                loop.epochs(best=...), it was not called after the last step. Or ranks do different things.
            NonFiniteError: A measure of a step, or a weight, is not finite.
            StopRequested: A rank was asked to stop before the last epoch; the checkpoint was written.
        """
        progress = self.progress
        assert progress.started
        if self.logged:  # the loop was left in the middle of an epoch
            self.end_step(is_left=True)
        progress.check_steps(self)
        headline = progress.started.headline
        if headline not in self.evaluated:
            if self.evaluated:
                raise InputError(
                    f"loop.epochs(headline={headline!r}) must name a measure of loop.evaluated, got "
                    f"{', '.join(self.evaluated)}: name one of these, or add it there"
                )
            missing = f"call loop.evaluated({'' if headline in self.measured else f'{headline}=...'})"
            raise InputError(f"{missing} at the end of each epoch, on every rank, as it adds up what all have measured")
        if self.best_tracker and self.evaluated_at != progress.step:
            raise InputError(
                "loop.evaluated must be called after an epoch's last step with loop.epochs(best=...), got step "
                f"{self.evaluated_at} of {progress.step}: the weights have changed since then, so evaluate them again"
            )
        if self.evaluated_at < progress.step - 1:  # within the last step, it may have been after the optimizer's
            progress.warn_once(OUTDATED)
        self.agree(Call.EPOCH_END)
        self.compare_between_ranks()
        finished = EpochFinished(
            epoch=progress.epoch,
            samples=progress.step * self._job.settings.batch_size,
            train=self.measures(progress.last.pairs),
            test={} if self.best_tracker else self.evaluated,
            validation=self.evaluated if self.best_tracker else {},
            train_seconds=progress.seconds,
            evaluate_seconds=progress.seconds_since_steps(),
            fraction=progress.step / self.steps,
            digest=self.digest(),
        )
        progress.evaluated(finished, [name for name, value in self.evaluated.items() if not math.isfinite(value)])
        if self.best_tracker:
            number = len(progress.history) - 1
            self.best_tracker.after_evaluation(number, self.evaluated, self.evaluated_weights())
        if self.best_models:
            self.best_models.after_evaluation()
        progress.begin_next(1.0)  # also where an epoch was left early
        self.evaluated, self.evaluated_at = {}, -1
        self.trains_on = self._resumed = None
        is_over = self.is_trained
        progress.owes_checkpoint = not is_over and self.must_wait()
        self._can_leave, self._last_step = not progress.owes_checkpoint, None
        stop = not is_over and not is_left and all_reduce_flags([self._link.stop_requested], self.device)[0]
        if not progress.owes_checkpoint:
            progress.save(self, is_over or stop)
            if stop:
                raise StopRequested(progress.epoch, progress.step)
        progress.go_on()

    @property
    def is_trained(self) -> bool:
        """Return whether no epoch is left to be trained."""
        has_waited = self.best_tracker is not None and self.best_tracker.is_over
        return self.progress.epoch == self._job.settings.epochs or has_waited

    def load_best_epoch(self) -> None:
        """Load the best epoch's weights into the network, and set is_over: later evaluations count as the test split's.

        The last epoch's weights stay if there is no best_tracker or, with a warning, if the headline was never finite.
        """
        self.is_over = True
        tracker = self.best_tracker
        if tracker and tracker.weights is not None:
            model = self.parts["model"]
            model.load_state_dict(add_module_versions(tracker.weights, model))
        elif tracker:
            self.progress.warn_once(
                f"the weights are those of the last epoch, not of the best: {tracker.measure} has never been a finite "
                "number: look for samples whose value divides by 0, or choose another headline"
            )

    def evaluated_weights(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated."""
        weights: dict[str, Tensor] = self.parts["model"].state_dict()
        return weights

    def best_weights(self) -> dict[str, Tensor]:
        """Return the weights of the best epoch so far."""
        assert self.best_tracker
        assert self.best_tracker.weights is not None
        return self.best_tracker.weights

    def _write(self, path: Path, _: Mapping[str, float], weights: Mapping[str, Any]) -> None:
        """Let rank 0 write the weights; raises OSError there alone."""
        if self._environment.rank == 0:
            export_model(weights, path)

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs, for a checkpoint.

        The result has all that loop.keep was given, the progress, the epoch's evaluation, the choice of the best epoch
        and, with virtual ranks, the units of gradients. Tensors are not copied, so the next step changes them.
        """
        return {
            **self.parts.state_dict(),
            "progress": self.progress.state_dict(),
            "evaluated": self.evaluated,
            "evaluated_at": self.evaluated_at,
            "grid": self.exact.parallel.grid if self.exact else None,
            "choice": self.best_tracker.state_dict() if self.best_tracker else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the training from a checkpoint's state, whose tensors are copied.

        If the checkpoint was written within an epoch, this leaves out gradients, and parameter groups that the user's
        code has yet to add. put_back() restores them later.

        Args:
            saved: what state_dict() has returned.

        Raises:
            InputError: The state does not fit what loop.keep was given.
        """
        is_within_epoch = saved["progress"]["step"] > 0
        self.parts.load_state_dict(saved, is_within_epoch)
        self._resumed = saved if is_within_epoch else None
        self._restore_evaluation(saved)
        self.progress.load_state_dict(saved["progress"])
        self._choice = saved["choice"]
        if self.exact:
            grid = saved["grid"]
            self.exact.parallel.grid = None if grid is None else grid.clone()

    def put_back(self) -> None:
        """Restore networks, optimizers, schedules, gradients and the evaluation once more after a resume in an epoch.

        Call this before the first step of each epoch: after a resume, the user's code before the steps has run again.
        The method does nothing after its first call, or without a resume within an epoch.

        Raises:
            InputError: The state does not fit what loop.keep was given.
        """
        saved, self._resumed = self._resumed, None
        if saved is None:
            return
        self.parts.put_back(saved)
        if saved["evaluated"]:  # otherwise the user's code may have evaluated again
            self._restore_evaluation(saved)

    def _restore_evaluation(self, saved: Mapping[str, Any]) -> None:
        """Restore the epoch's evaluation from what state_dict() has returned."""
        self.evaluated = saved["evaluated"]
        self.evaluated_at = saved.get("evaluated_at", -1)  # checkpoints of earlier versions lack it

    # --- parts of a step ---

    @property
    def _is_logged(self) -> bool:
        """Whether the step that comes next is."""
        number = self.progress.step + 1
        return number % self._job.settings.log_interval == 0 or number == self.steps

    def digest(self) -> str:
        """Return the digest of the network's weights, 16 hex digits; a collective."""
        return weights_digest(self.parts["model"].state_dict(), device=self.device)
