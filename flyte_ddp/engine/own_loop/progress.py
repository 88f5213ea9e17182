"""How far a loop of the user's own has come: its sums, what it tells of them, and what a checkpoint has."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.checkpoints.writer import whole_checkpoints
from flyte_ddp.engine.digest import differ_between_ranks, weights_digest
from flyte_ddp.engine.hosts.machine import machine, moved
from flyte_ddp.engine.hosts.places import places_of_ranks
from flyte_ddp.engine.hosts.unlike import unlike
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepClock, StepPart
from flyte_ddp.engine.monitor.stragglers import Stragglers
from flyte_ddp.engine.own_loop.agreement import Call, agree
from flyte_ddp.engine.own_loop.arrangement import arrangement, load, without_later_groups
from flyte_ddp.engine.own_loop.names import names_on_all_ranks
from flyte_ddp.engine.own_loop.optimizers import LEFT_OUT, MOST_WAITED, Optimizers
from flyte_ddp.engine.own_loop.parts import ExactGradients
from flyte_ddp.engine.own_loop.results import result_of, write_model
from flyte_ddp.engine.own_loop.started import run_started
from flyte_ddp.engine.step import Totals, constants
from flyte_ddp.engine.sums import StepSums, Sums
from flyte_ddp.engine.torch_compat import norms, version
from flyte_ddp.engine.virtual_ranks.rules import uneven_parts
from flyte_ddp.errors import InputError, NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished, RunStarted, StepLogged
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.random_numbers import Use, key_of

DRIFTED = (
    "the ranks have other weights than one another, and those of rank 0 are returned: change them alike on all ranks, "
    "by gradients of what loop.wrap has returned, or from the same random numbers"
)
UNMEASURED = (
    "the loop has returned within an epoch, so no measures are those of the weights that it returns: call "
    "loop.evaluated before, also where the epoch is left early"
)


class Progress:
    """What the ranks know alike, but for what the current step has logged.

    Attributes:
        epoch, step: from 0; the latter of the epoch, the number of those that are done.
        parts: what changes while it trains, by name; "model" is the network itself.
        optimizers: those among the parts.
        wrapped: the networks that the ranks train together.
        exact: with virtual ranks, what adds their gradients up.
        batches, steps: of an epoch; None and 0 before they are known.
        trains_on: what the steps of the current epoch come from; None before the first of this attempt.
        logged: the measures of the current step; empty before and after it.
        evaluated: the measures of the current epoch's evaluation.
        part: of the batch that loop.evaluation has given; None outside of it.
        is_cut: whether the last evaluation was left before its end.
        measured: by name (parts, 2) float64, the sums and weights that loop.measured was given for each part.
        is_stepping: whether the user's code is in a step.
        step_seed: the seed of the current step.
        backward_calls: how many times the current step has called Loop.backward.
        test_samples: of all evaluations.
        history: the epochs that are done.
        ran_on: see hosts/machine.py.
    """

    def __init__(self, environment: Environment, device: torch.device, link: Link, job: Job):
        self.device, self.epoch, self.step = device, 0, 0
        self.parts: dict[str, Any] = {}
        self.optimizers = Optimizers(self.parts)
        self.wrapped: list[nn.Module] = []
        self.exact: ExactGradients | None = None
        self.batches: TrainBatches | None = None
        self.steps = self.test_samples = 0
        self.trains_on: object = None
        self.is_stepping = self._owes_checkpoint = False
        self.step_seed = self.backward_calls = 0
        self.logged = dict[str, Tensor]()
        self.evaluated: dict[str, float] = {}
        self.part: int | None = None
        self.measured: dict[str, Tensor] = {}
        self.is_cut = False
        self.clock, self.names = StepClock(device), list[str]()
        self._environment, self._link, self._job = environment, link, job
        self._started: RunStarted | None = None
        self.history: list[EpochFinished] = []
        self.ran_on: list[dict[str, Any]] = []
        self._monitor = LossMonitor(remedies="lower the learning rate, or clip gradients")
        self._writer = whole_checkpoints(environment, link.emit, job)
        self._seconds = self._rate = self._norm = 0.0  # the first of the epoch's steps
        self._pending: dict[int, Tensor] = {}  # gradients, which the next checkpoint has
        self._waited = 0  # steps in a row
        self._resumed: Mapping[str, Any] | None = None  # a checkpoint's state, within an epoch whose steps are to come
        self._set_to_zero()

    def _set_to_zero(self) -> None:
        count = len(self.names)
        self._sums, self._flag = StepSums(count, self.device), torch.zeros((), dtype=torch.bool, device=self.device)
        zero = Sums((0.0,) * 2 * count, 0, 0, stop=False, saves=0, seconds=0.0)
        self._last, self._told = zero, zero

    @property
    def is_started(self) -> bool:
        return self._started is not None

    def start(self, headline: str, percent: tuple[str, ...], precision: str) -> None:
        """A collective."""
        if not self.batches or not self.parts:
            missing = "loop.keep" if self.batches else "loop.batches"
            raise InputError(f"call {missing} before loop.epochs: a checkpoint could not be resumed without")
        job, world = self._job, self._environment.world
        places = places_of_ranks(self._environment, self.device, job, self.parts["model"])
        self.ran_on, moves = moved(self.ran_on, machine(places, precision, job.options), job.settings.virtual_ranks)
        hosts = [place.host for place in places]
        self._stragglers = Stragglers(hosts, self.batches.split.remedy, meet_within=True)  # in the backward pass
        remarks = [*moves, *uneven_parts(job.settings.virtual_ranks, world.size)]
        self._started = run_started(self, job, world, hosts, headline, percent, precision, remarks)
        self._link.emit(self._started)
        self._warn(self.epoch, self.step, unlike(places, job.options))
        if self.exact:
            audit = Audit(self.exact.parallel, self.batches, 0, places, self._warn)
            self.exact.add_up = lambda backward, shares, call: audit.added_up(
                backward, shares, self.epoch, self.step, call
            )
        self._since = time.perf_counter() - self._seconds

    def agree(self, call: Call) -> None:
        """Raise InputError if another rank does something else here; a collective."""
        agree(call, self.epoch, self.step)

    def begin_step(self) -> None:
        self.is_stepping = True
        self.step_seed = key_of(Use.OWN_STEP, self._job.settings.seed, self.epoch, self.step)
        self.backward_calls = 0
        self.optimizers.begin_step()
        groups = [group for part in self.parts.values() for group in getattr(part, "param_groups", ())]
        self._rate, self._norm = float(groups[0]["lr"]) if groups else 0.0, 0.0

    def before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Before it steps. Looks at gradients where they are logged, as they may be gone then; the host waits."""
        if not self.optimizers.have(optimizer):
            kind = type(optimizer).__name__
            raise InputError(f"loop.keep must have the {kind} that steps: a resume would begin with a new one")
        if self.exact:
            self.exact.check_optimizer(optimizer)
        if not self.is_stepping:
            raise InputError("an optimizer must step within `for … in loop.batches`: elsewhere each rank is by itself")
        gradients = [weight.grad for weight in self.parts["model"].parameters() if weight.grad is not None]
        if self._is_logged and gradients:
            self._norm = float(norms(gradients).norm())

    def _waits(self) -> bool:
        """Return whether a checkpoint has to wait, as rank 0 would write gradients that are its own; a collective.

        Not without end: it may be that nothing is ever done with these gradients.
        """
        for idle_alone in (False, True):
            self._pending = self.optimizers.pending(idle_alone)
            if not differ_between_ranks(self._pending.values(), self.device):
                self._waited = 0
                return False
        self._pending = {}
        self._waited += 1
        if self._waited > MOST_WAITED:
            self._warn_once(LEFT_OUT)
        return self._waited <= MOST_WAITED

    def end_step(self, is_left: bool = False) -> None:
        """Once the user's code has done all that belongs to the step; a collective.

        Raises StopRequested, after a checkpoint, if any rank was asked to stop, and NonFiniteError, before one.
        is_left: whether no further step of the epoch comes. A resume from here would go on with them, so the epoch's
        end has the checkpoint, and a request to stop waits for the next step.
        """
        self.clock.lap(StepPart.COMPUTING)
        if not self.logged:
            raise InputError("call loop.log(loss=...) once in each step")
        if self.measured:
            raise InputError(
                "loop.evaluated must be called after an evaluation, before a step ends, as a checkpoint has no sums of "
                "loop.measured: call it where the evaluation ends"
            )
        self.agree(Call.STEP_END)
        if not self.names:
            self.names = names_on_all_ranks("loop.log", self.logged)
            self._set_to_zero()
        own = torch.stack([self.logged[name] for name in self.names])
        asked = float(self._link.stop_requested), float(self._writer.due())
        totals = torch.cat([own, constants(asked, self.device).to(own.dtype)])
        distributed.all_reduce(totals)
        self.clock.lap(StepPart.WAITING)
        values, requests = totals.split([len(own), 2])
        self._flag.logical_or_((values - values).sum())  # 0 if finite, else NaN, which counts as true
        measured = torch.stack([values, torch.full_like(values, self._environment.world.size)], 1).flatten()
        self._sums.add(Totals(measured, requests, measured[:0]), self._flag)
        is_logged, self.logged, self.is_stepping = self._is_logged, {}, False
        self.step += 1
        self._link.heartbeat()
        self._seconds = time.perf_counter() - self._since
        recent = self._sums.recent(self.step, self._seconds)
        if not is_logged and not self._owes_checkpoint and not (recent and recent.asks(self._last)):
            return
        before = self._last
        self._look(own)
        if is_logged:
            self._tell()
        if is_left:
            return
        self._owes_checkpoint |= self._last.stop or (self._last.saves > before.saves and self.step < self.steps)
        if self._owes_checkpoint and not self._waits():
            self._save(self._last.stop)
            if self._last.stop:
                raise StopRequested(self.epoch, self.step)

    def end_epoch(self) -> None:
        """A collective."""
        assert self._started
        if self.logged:  # the loop was left in the middle of an epoch
            self.end_step(is_left=True)
        self._look()  # at steps since the last log, then, and after a resume at those before it
        if self._started.headline not in self.evaluated:
            if self.evaluated:
                raise InputError(
                    f"loop.epochs(headline={self._started.headline!r}) must name a measure of loop.evaluated, got "
                    f"{', '.join(self.evaluated)}: name one of these, or add it there"
                )
            missing = f"call loop.evaluated({self._started.headline}=...)"
            raise InputError(f"{missing} at the end of each epoch, on every rank, as it adds up what all have measured")
        self.agree(Call.EPOCH_END)
        finished = EpochFinished(
            epoch=self.epoch,
            samples=self.step * self._job.settings.batch_size,
            train=self._means(self._last.pairs),
            test=self.evaluated,
            train_seconds=self._seconds,
            evaluate_seconds=time.perf_counter() - self._since - self._seconds,
            fraction=self.step / self.steps,
            digest=self._digest(),
        )
        self.history.append(finished)
        self._link.emit(finished)
        broken = [name for name, value in self.evaluated.items() if not math.isfinite(value)]
        for warning in self._monitor.not_finite(broken, finished.split, finished.position, self.step):
            self._link.emit(warning)
        self._link.emit(self._stragglers.so_far())
        weights = [weight for network in self.wrapped for weight in network.parameters()]
        if differ_between_ranks([*weights, *self.optimizers.weights()], self.device):  # buffers may: rank 0's count
            self._warn_once(DRIFTED)
        self.epoch, self.step, self.evaluated, self._seconds = self.epoch + 1, 0, {}, 0.0
        self.trains_on = self._resumed = None
        self._set_to_zero()
        is_over = self.epoch == self._job.settings.epochs
        self._owes_checkpoint = not is_over and self._waits()
        if not self._owes_checkpoint:
            self._save(is_over)
        self._since = time.perf_counter()

    def finish(self) -> TrainingResult:
        """Once the user's function has returned: rank 0 writes the weights; a collective."""
        if not self._started:
            raise InputError(f"{self._job.recipe} must train in `for epoch in loop.epochs():`, and has not called it")
        if self.evaluated:  # the loop over the epochs was left
            self.end_epoch()
        elif self.step or self.logged:
            if self.logged:
                self.end_step(is_left=True)
            self._look()
            self._warn_once(UNMEASURED)
        if self._owes_checkpoint:
            self._save(is_last=True)
        self.close()
        if self._environment.rank == 0:
            write_model(self.parts["model"], self._job)
        return result_of(
            self._started, self.history, self._monitor.warnings, self.parts["model"], self.device, self._digest()
        )

    def close(self) -> None:
        self._link.heartbeat(WRITING)
        self._writer.close()

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs; tensors are those of the training itself, which the next step changes."""
        return {
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "arrangement": arrangement(self.parts),
            "gradients": self._pending,
            "epoch": self.epoch,
            "step": self.step,
            "names": self.names,
            "evaluated": self.evaluated,
            "sums": self._sums.values,
            "told": asdict(self._told),
            "seconds": self._seconds,
            "history": [asdict(finished) for finished in self.history],
            "ran_on": self.ran_on,
            "watch": self._monitor.state_dict(),
            "grid": self.exact.grid if self.exact else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state; raises InputError if it does not fit. Tensors of saved are copied."""
        with _fitting():
            if saved["parts"].keys() != self.parts.keys():
                raise ValueError(f"it has {', '.join(saved['parts'])}")
            states, arranged = saved["parts"], saved["arrangement"]
            if saved["step"]:
                states, arranged = without_later_groups(self.parts, states, arranged)
                self._resumed = saved
            load(self.parts, states, arranged)
            if not saved["step"]:
                self.optimizers.put_back(saved["gradients"])
        self.evaluated = saved["evaluated"]
        self.epoch, self.step, self.names = saved["epoch"], saved["step"], saved["names"]
        self._set_to_zero()
        measured = slice(2 * len(self.names))  # without what was asked for then
        self._sums.values[measured] = saved["sums"][measured].to(self.device)
        self._told, self._seconds = Sums(**saved["told"]), saved["seconds"]
        self.history = [EpochFinished(**finished) for finished in saved["history"]]
        self.ran_on = saved["ran_on"]
        self._monitor.load_state_dict(saved["watch"])
        if self.exact:
            grid = saved.get("grid")
            self.exact.grid = None if grid is None else grid.clone()

    def put_back(self) -> None:
        """Restore what the user's code has changed before the steps of an epoch in which the training is resumed.

        It runs there again. Parts of other kinds, which may be iterators, are left alone.
        """
        saved, self._resumed = self._resumed, None
        if saved is None:
            return
        kinds = nn.Module, Optimizer, LRScheduler
        parts = {name: part for name, part in self.parts.items() if isinstance(part, kinds)}
        with _fitting():
            load(parts, saved["parts"], saved["arrangement"])
            self.optimizers.put_back(saved["gradients"])
        self.evaluated = saved["evaluated"] or self.evaluated

    def buffer_versions(self) -> dict[str, int]:
        """Return by name how often each buffer of what loop.keep has was changed in place."""
        networks = {name: part for name, part in self.parts.items() if isinstance(part, nn.Module)}
        return {
            f"{name}.{buffer_name}": version(buffer)
            for name, network in networks.items()
            for buffer_name, buffer in network.named_buffers()
        }

    # --- parts of a step ---

    @property
    def _is_logged(self) -> bool:
        """Whether the step that comes next is."""
        return (self.step + 1) % self._job.settings.log_interval == 0 or self.step + 1 == self.steps

    def _look(self, own: Tensor | None = None) -> None:
        """Waits for the sums of all steps so far; raises NonFiniteError. own: what this rank logged last."""
        self._last = self._sums.now(self.step, self._seconds)
        if self._last.steps == self.step:
            return
        ranks = range(self._environment.world.size)
        is_bad: list[Any] = [None] * len(ranks)
        distributed.all_gather_object(is_bad, own is not None and not bool(own.isfinite().all()))
        bad = [rank for rank in ranks if is_bad[rank]] or [*ranks]
        raise NonFiniteError.in_step("loss", bad, self.epoch, self._last.steps)

    def _tell(self) -> None:
        """Of the steps since this was last done; a collective."""
        before = self._told
        self._told = self._last
        size = self._job.settings.batch_size
        samples, measures = (self._last.step - before.step) * size, self._means(self._last.since(before))
        self._link.emit(
            StepLogged(
                epoch=self.epoch,
                step=self.step,
                samples=self.step * size,
                measures=measures,
                learning_rate=self._rate,
                samples_per_second=samples / (self._last.seconds - before.seconds),
                gradient_norms={},
                gradient_norm=self._norm,
            )
        )
        for warning in self._monitor.after_steps(self.epoch, self.step, measures["loss"], samples):
            self._link.emit(warning)
        steps, times = self.clock.steps, self.clock.read_all()
        self._sums.readback.keep_pace(float(times[:, : StepPart.OTHER].sum(1).max()) / steps)
        slow = self._stragglers.after_steps(self.epoch, self.step, steps, times)
        self._monitor.warnings += slow
        for event in (self._stragglers.so_far(), *slow) if slow else ():
            self._link.emit(event)

    def _means(self, pairs: Sequence[float]) -> dict[str, float]:
        return {name: pairs[2 * n] / pairs[2 * n + 1] for n, name in enumerate(self.names) if pairs[2 * n + 1]}

    def _digest(self) -> str:
        return weights_digest(self.parts["model"].state_dict(), device=self.device)

    def _warn(self, epoch: int, step: int, reasons: Sequence[str]) -> None:
        for warning in self._monitor.noted(epoch, step, reasons):
            self._link.emit(warning)

    def _warn_once(self, reason: str) -> None:
        if all(warning.reason != reason for warning in self._monitor.warnings):
            for warning in self._monitor.noted(self.epoch, self.step, [reason]):
                self._link.emit(warning)

    def _save(self, is_last: bool) -> None:
        self._owes_checkpoint = False
        self._link.heartbeat(WRITING)
        self._writer.save(self, is_last)


@contextmanager
def _fitting() -> Iterator[None]:
    """Raise InputError for what does not fit."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the checkpoint does not fit what loop.keep was given: {' '.join(str(error).split())}: keep the same, "
            "or drop it by RunOptions(resume=False)"
        ) from None
