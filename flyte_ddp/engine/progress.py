"""The progress of a training, and the one place that tells of it: its start, steps, evaluations, warnings and result.

Recipes, loops of users' own and LightningModules each have a Progress. A number that is new for each step is added here
alone.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine.contracts import Checkpoints, Plan, Resumable, Training
from flyte_ddp.engine.hosts.places import Place, add_machine, describe_machine, hardware, measure_places
from flyte_ddp.engine.hosts.unlike import list_bad_hosts, list_oddities
from flyte_ddp.engine.job import Job, KeptModel, TrainingResult
from flyte_ddp.engine.measures import TOKENS
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepClock, StepPart
from flyte_ddp.engine.monitor.stragglers import Stragglers
from flyte_ddp.engine.step import Totals, constants
from flyte_ddp.engine.sums import StepSums, Sums
from flyte_ddp.errors import NonFiniteError, StopRequested, WrongBitsError
from flyte_ddp.events import EpochFinished, Event, NotLearning, OddNodes, RunStarted, StepLogged, list_digests
from flyte_ddp.launch.environment import NODE_VARIABLE, Environment
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.peaks import model_flops_utilization
from flyte_ddp.launch.phases import WRITING


class Asked(NamedTuple):
    """The requests of all ranks in the steps since the last look; every rank has the same.

    Attributes:
        stop: whether any rank was asked to stop.
        save: whether rank 0 wants a checkpoint.
        bad_step: the first step, from 0, in which a number was not finite; None without one.
    """

    stop: bool
    save: bool
    bad_step: int | None


NOTHING = Asked(stop=False, save=False, bad_step=None)
SHORTEST = 1e-9  # seconds that some steps take, by a clock that may be coarse
LEFT_OUT = "updates left out in steps {1} to {2} of epoch {3}, whose gradients leap: {0}"


class Progress:
    """The position of a training, its measures so far, and what is told of them; the same on all ranks.

    Attributes:
        epoch, step: the position, both from 0; step is the number of the epoch's steps that are done.
        seconds: of the steps since the last evaluation.
        names: of the measures of a step; empty before they are known.
        sums: of these measures, since the last evaluation.
        history: each evaluation, with the training before it.
        ran_on: see describe_machine.
        monitor: the losses and warnings.
        clock: where a rank's time goes.
        checkpoints: what writes checkpoints; None before the first step, and on a rank that writes none.
        places: of each rank; empty before the start.
        started: what was told at the start; None before it.
        owes_checkpoint: whether a checkpoint was asked for that has to wait.
        tokens: of all logged steps.
        skipped_updates: the same for updates that were left out, see TrainingSettings.skip_spikes.
    """

    def __init__(self, device: torch.device, link: Link, monitor: LossMonitor):
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.history: list[EpochFinished] = []
        self.ran_on: list[dict[str, Any]] = []
        self.monitor, self.clock = monitor, StepClock(device)
        self.checkpoints: Checkpoints | None = None
        self.places: Sequence[Place] = ()
        self.started: RunStarted | None = None
        self.owes_checkpoint = False
        self.tokens, self.skipped_updates = 0.0, 0
        self._device, self._link = device, link
        # Whether a measure was not finite since the last evaluation, where add_up() is used
        self._is_bad = torch.zeros((), dtype=torch.bool, device=device)
        self._since = time.perf_counter()
        self.measure([])

    # --- the start ---

    def start(self, environment: Environment, job: Job, plan: Plan, model: nn.Module) -> None:
        """Emit RunStarted and warnings of odd hosts, and start the clock; a collective.

        Call this before the first step, and after a checkpoint is loaded. The call also sets `places`, the host and
        device of each rank, and adds this attempt's machine to ran_on. Warnings are emitted of odd hosts, and of hosts
        in job.avoided. A host is odd if it differs from the others, if its processor or GPU computes wrong products or
        is slow, or if its disk has too little room. On a cluster, OddNodes is emitted for hosts whose own hardware is
        odd.

        Args:
            environment: this rank, and the number of ranks.
            job: the job.
            plan: the numbers of epochs, steps and samples, and what else is known before the first step.
            model: the network, for its layers and the size of its weights.

        Raises:
            RecoverableError: A host is odd, and options.odd_hosts is "refuse".
        """
        world = environment.world
        self.places = measure_places(environment, self._device, job, model)
        hosts = [place.host for place in self.places]
        virtual_ranks: int | None = getattr(job.settings, "virtual_ranks", None)  # Lightning's settings have none
        machine = describe_machine(self.places, plan.precision, job.options)
        self.ran_on, moves = add_machine(self.ran_on, machine, virtual_ranks)
        has_gpus = self._device.type == "cuda"
        self._plan, self._world = plan, world
        self._stragglers = Stragglers(hosts, plan.slow_data, plan.meets_within, has_gpus)
        self.started = RunStarted(
            dataset=job.dataset,
            samples=plan.samples,
            headline=plan.headline,
            percent=plan.percent,
            train_samples=plan.train_samples,
            test_samples=plan.test_samples,
            samples_per_epoch=plan.samples_per_epoch,
            world_size=world.size,
            backend=world.backend,
            device=str(self._device),
            precision=plan.precision,
            epochs=plan.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            first_epoch=self.epoch,
            first_step=self.step,
            startup_seconds=time.time() - job.launched,
            layers=list_layers(model),
            validation_samples=plan.validation_samples,
            remarks=[*plan.remarks, *moves],
            hosts=hosts,
            identity=job.identity,
            ran_on=self.ran_on,
            earlier=list_digests(self.history),
            may_end_early=plan.may_end_early,
        )
        self._link.emit(self.started)
        oddities = list_oddities(self.places, job.options)
        avoided = [job.avoided[host] for host in dict.fromkeys(hosts) if host in job.avoided]
        self.warn(self.epoch, self.step, [*avoided, *oddities])
        if os.environ.get(NODE_VARIABLE) and (odd := list_bad_hosts(self.places)):
            self._link.emit(OddNodes(tuple(odd), "; ".join(oddities)))
        self.go_on()

    def go_on(self) -> None:
        """Restart the clock of the steps so that it continues from the seconds measured so far."""
        self._since = time.perf_counter() - self.seconds

    def seconds_since_steps(self) -> float:
        """Return the time since the last step ended, such as that of an evaluation."""
        return time.perf_counter() - self._since - self.seconds

    # --- steps ---

    def measure(self, names: Sequence[str]) -> None:
        """Set the names of the measures, and begin their sums at 0."""
        self.names = list(names)
        self.sums = StepSums(len(names), self._device)
        self._begin()

    def _begin(self) -> None:
        """Reset the sums that run from one evaluation to the next."""
        self.sums.values.zero_()
        self._is_bad.zero_()
        none = Sums((0.0,) * 2 * len(self.names), self.step, self.step, stop=False, saves=0, seconds=0.0)
        self.last = self._told = none

    def requests(self) -> tuple[bool, bool]:
        """Return whether this rank is asked to stop, and whether it asks for a checkpoint."""
        return self._link.stop_requested, self.checkpoints is not None and self.checkpoints.due()

    def add_up(self, pairs: Tensor) -> None:
        """Sum a step's measures and requests over all ranks, and add the result to the sums of all steps; a collective.

        Steps of recipes send their measures together with the gradients instead. This rank's requests are those that
        requests() returns. The host does not wait for the device. If a measure is not finite, this step and all later
        ones are marked as bad.

        Args:
            pairs: (2 * measures,) float64, this rank's value and weight of each measure, alternating.
        """
        requests = constants(tuple(map(float, self.requests())), self._device)
        totals = torch.cat([pairs, requests.to(pairs.dtype)])
        distributed.all_reduce(totals)
        self.clock.lap(StepPart.WAITING)
        measured, asked = totals.split([len(pairs), 2])
        self._is_bad.logical_or_((measured - measured).sum())  # 0 if finite, else NaN, which counts as true
        self.sums.add(Totals(measured, asked, measured[:0]), self._is_bad)

    def end_step(self, training: Training, is_logged: bool) -> Asked:
        """Log the latest steps if is_logged is set, and return the requests of all ranks; a collective.

        Call it after each step. Mostly it returns NOTHING, and the host does not wait for the device. In three cases
        the host waits, and reads the sums over all steps: is_logged is set, a checkpoint is owed, or the latest sums
        that have reached the host have a request or a bad number.

        Args:
            training: the training whose sums have the step.
            is_logged: whether the latest steps are to be logged. All ranks pass the same value.

        Returns:
            The requests since the sums were last read, the same on all ranks; NOTHING if the sums are not read now. If
            bad_step is not None, training.go_back() has restored the training as it was before that step, and nothing
            is logged: the caller must take the steps again from there.

        Raises:
            NonFiniteError: A number of a step was not finite, and go_back() has changed nothing. All ranks raise it.
        """
        self._link.heartbeat()
        self.seconds = time.perf_counter() - self._since
        recent = self.sums.recent(self.step, self.seconds)
        is_asked = recent is not None and recent.asks(self.last)
        if not (is_asked or is_logged or self.owes_checkpoint):
            return NOTHING
        asked = self._read_sums()
        if asked.bad_step is not None:
            if training.go_back(asked.bad_step):
                return asked
            raise training.step_error(asked.bad_step)
        if is_logged:
            self._log(training)
        return asked

    def save_or_stop(self, training: Training, asked: Asked, is_evaluation_next: bool = False) -> None:
        """Save a checkpoint if a rank has asked to save or to stop, and then stop if asked to; a collective.

        training.compare_between_ranks() is called before saving, and its errors are passed on. If the training must
        wait before it can write a checkpoint, owes_checkpoint is set, and a call after a later step saves.

        Args:
            training: the training.
            asked: the requests of all ranks, as end_step() has returned them.
            is_evaluation_next: whether an evaluation and its checkpoint follow now. Then a request to save is ignored,
                but not a request to stop, or a checkpoint that is owed.

        Raises:
            StopRequested: A rank was asked to stop, and the checkpoint is saved.
        """
        self.owes_checkpoint |= asked.stop or (asked.save and not is_evaluation_next)
        if not self.owes_checkpoint or training.must_wait():
            return
        training.compare_between_ranks()
        self.save(training, is_last=asked.stop)
        if asked.stop:
            raise StopRequested(self.epoch, self.step)

    @property
    def is_logged(self) -> bool:
        """Return whether all steps since the last evaluation are logged."""
        return self._told.step == self.step

    def check_steps(self, training: Training) -> None:
        """Read the sums, and check that the numbers of all steps since the last evaluation are finite; a collective.

        Call it before an evaluation. The host waits for the device. Afterwards `last` has the sums.

        Raises:
            NonFiniteError: A number of a step was not finite. All ranks raise it.
        """
        bad_step = self._read_sums().bad_step
        if bad_step is not None:
            raise training.step_error(bad_step)

    def _read_sums(self) -> Asked:
        before = self.last
        now = self.sums.now(self.step, self.seconds)
        if now.steps < self.step:
            return Asked(now.stop, now.saves > before.saves, now.steps)
        self.last = now
        return Asked(now.stop, now.saves > before.saves, None)

    def _log(self, training: Training) -> None:
        """Emit StepLogged for the steps since the last call, and warnings if there are any; a collective.

        Warnings are on updates that were left out, a loss that leaps, and slow ranks. Call this after end_step() has
        read the sums. The call also adds to the count of tokens, and sets how many steps the host may be ahead of the
        device.
        """
        now, before = self.last, self._told
        self._told = now
        pairs = now.since(before)
        measures, figures = training.measures(pairs), training.figures()
        seconds = max(now.seconds - before.seconds, SHORTEST)
        samples = training.samples(now)
        recent = samples - training.samples(before)
        tokens = self._count_tokens(pairs, before.step, now.step)
        self.tokens += tokens
        flops = self._plan.sample_flops * recent / seconds
        self._link.emit(
            StepLogged(
                epoch=self.epoch,
                step=self.step,
                samples=samples,
                measures=measures,
                learning_rate=figures.learning_rate,
                samples_per_second=recent / seconds,
                gradient_norms=dict(figures.gradient_norms),
                gradient_norm=figures.gradient_norm,
                tokens_per_second=tokens / seconds if tokens else None,
                mfu=model_flops_utilization(flops, hardware(self._device), self._plan.precision, self._world),
                peak_memory_gib=(self._peak_gpu_memory() or peak_memory()) / 2**30,
            )
        )
        new = figures.skipped_updates - self.skipped_updates
        self.skipped_updates = figures.skipped_updates
        if new > 0:
            self._link.emit(
                NotLearning(self.epoch, self.step, LEFT_OUT.format(new, before.step + 1, now.step, self.epoch + 1))
            )
        self.emit_all(self.monitor.after_steps(self.epoch, self.step, measures["loss"], recent))
        self.sums.readback.keep_pace(self._check_stragglers())

    def _count_tokens(self, pairs: Sequence[float], first: int, end: int) -> float:
        """Return how many tokens all ranks had in some steps of the epoch; 0 if tokens are not counted.

        The count is the sum of the measure "tokens", if there is one. Otherwise the samples' lengths give it, if the
        plan has them.

        Args:
            pairs: the sum of values and the sum of weights of each measure over these steps, alternating.
            first: the first step, from 0.
            end: the step after the last one.
        """
        if TOKENS in self.names:
            return pairs[2 * self.names.index(TOKENS)]
        return self._plan.count_tokens(self.epoch, first, end) if self._plan.count_tokens else 0

    def _peak_gpu_memory(self) -> int:
        """Return the most bytes that this rank's tensors have had on its GPU; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _check_stragglers(self) -> float:
        """Warn of slow ranks, and return the mean seconds of a step on the slowest rank; a collective.

        The mean is over the steps since the last call. A step's seconds are those of reading data, computing and
        waiting for other ranks. The call sets the clock to zero, and adds new warnings to the monitor. If there are
        new ones, RanksTimed and these warnings are emitted.
        """
        steps, times = self.clock.steps, self.clock.read_all()
        slow = self._stragglers.after_steps(self.epoch, self.step, steps, times)
        self.monitor.warnings += slow
        if slow:
            self._link.emit(self._stragglers.so_far())
        self.emit_all(slow)
        return float(times[:, : StepPart.OTHER].sum(1).max()) / max(1, steps)

    # --- evaluations ---

    def evaluated(self, finished: EpochFinished, broken: Iterable[str] = (), guessing_loss: float = 0.0) -> None:
        """Add an evaluation to the history, and emit events: the evaluation, RanksTimed, and warnings.

        There are warnings of measures that are not finite, of a loss whose weights add up to 0, and of a loss no better
        than guessing.

        Args:
            finished: the evaluation, and the training before it.
            broken: the names of the measures of which a sample's value is NaN or infinite.
            guessing_loss: the mean loss of outputs paired with other samples, or 0 if it is unknown. It stands in for
                an unknown constant_loss.
        """
        self.history.append(finished)
        self._link.emit(finished)
        self._link.emit(self._stragglers.so_far())
        split, position = finished.split, finished.position
        warnings = self.monitor.warn_of_not_finite(broken, split, position, self.step)
        if "loss" in finished.evaluated:
            if math.isnan(finished.evaluated["loss"]):  # though no sample's is
                warnings += self.monitor.warn_of_no_weights(split, position, self.step)
            warnings += self.monitor.after_evaluation(finished, self.step, guessing_loss)
        self.emit_all(warnings)

    def begin_next(self, fraction: float) -> None:
        """Reset the sums and `seconds` after an evaluation, and go on to the next epoch if this one has ended.

        Args:
            fraction: how much of the epoch has been trained. 1 ends the epoch; otherwise epoch and step stay.
        """
        if fraction == 1:
            self.epoch, self.step = self.epoch + 1, 0
        self.seconds = 0.0
        self._begin()

    # --- warnings, checkpoints, the result ---

    def warn(self, epoch: int, step: int, reasons: Sequence[str]) -> None:
        """Tell of these reasons to look at the training."""
        self.emit_all(self.monitor.record(epoch, step, reasons))

    def warn_once(self, reason: str) -> None:
        """Tell of this reason, unless it was told before."""
        if all(warning.reason != reason for warning in self.monitor.warnings):
            self.warn(self.epoch, self.step, [reason])

    def emit_all(self, events: Iterable[Event]) -> None:
        """Tell of these events, one after the other."""
        for event in events:
            self._link.emit(event)

    def save(self, training: Resumable, is_last: bool = False) -> None:
        """Write a checkpoint; a collective. is_last: whether training ends with it."""
        self.owes_checkpoint = False
        self._link.heartbeat(WRITING)
        if self.checkpoints:
            self.checkpoints.save(training, is_last)

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        self._link.heartbeat(WRITING)
        if self.checkpoints:
            self.checkpoints.close()

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Wait until this rank's last checkpoint is written, when the block ends or fails; a context manager.

        After a NonFiniteError or WrongBitsError, which all ranks must raise, each rank also waits for the other ranks'
        checkpoints. After any other error, a rank waits for its own checkpoint alone.
        """
        try:
            yield
        except (NonFiniteError, WrongBitsError):  # raised on all ranks at once; the first report of it ends them all
            self.close()
            distributed.barrier()
            raise
        finally:
            self.close()

    def result(
        self,
        model: nn.Module,
        digest: str,
        tested: Mapping[str, float],
        test_samples: int | None = None,
        chosen_epoch: int | None = None,
        kept: Sequence[KeptModel] = (),
    ) -> TrainingResult:
        """Return the result of the training, as this rank knows it at the end.

        It has the history, the warnings and the peak memory, besides what is passed here.

        Args:
            model: the network, whose parameters are counted.
            digest: the digest of the weights that the training returns.
            tested: the measures of the test split with these weights.
            test_samples: the number of test samples; by default as planned at the start.
            chosen_epoch: the number of the evaluation whose weights are returned, from 0; None if none was chosen as
                the best.
            kept: the best evaluations' models, the best first, as options.keep_best asked for.
        """
        plan = self._plan
        return TrainingResult(
            epochs=self.history,
            warnings=self.monitor.warnings,
            headline=plan.headline,
            train_samples=plan.train_samples,
            test_samples=plan.test_samples if test_samples is None else test_samples,
            precision=plan.precision,
            peak_bytes=peak_memory(),
            peak_gpu_bytes=self._peak_gpu_memory(),
            validation_samples=plan.validation_samples,
            tested=dict(tested),
            chosen_epoch=chosen_epoch,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            sample_flops=plan.sample_flops,
            tokens=self.tokens,
            skipped_updates=self.skipped_updates,
            hardware=hardware(self._device),
            kept=list(kept),
            digest=digest,
            lower_is_better=list(plan.lower_is_better),
        )

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state that load_state_dict() takes.

        Tensors and lists in it are not copied. The next step changes them, so write or copy the state before that step.
        """
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "names": self.names,
            "sums": self.sums.values,
            "told": asdict(self._told),
            "tokens": self.tokens,
            "skipped_updates": self.skipped_updates,
            "history": [asdict(finished) for finished in self.history],
            "ran_on": self.ran_on,
            "watch": self.monitor.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what state_dict() has returned: position, sums, history, monitor and machines; tensors are copied.

        Requests to stop or save in the saved sums are dropped.
        """
        self.epoch, self.step, self.seconds = saved["epoch"], saved["step"], saved["seconds"]
        if saved["names"] != self.names:
            self.measure(saved["names"])
        measured = slice(2 * len(self.names))  # without what ranks had asked for
        self.sums.values[measured] = saved["sums"][measured].to(self._device)
        self.sums.values[measured.stop :] = 0
        told, self.tokens, self.skipped_updates = saved["told"], saved["tokens"], saved["skipped_updates"]
        self._told = Sums(**{**told, "pairs": tuple(told["pairs"]), "saves": 0})
        self.last = self.sums.now(self.step, self.seconds)
        self.history = [EpochFinished(**finished) for finished in saved["history"]]
        self.ran_on = saved["ran_on"]
        self.monitor.load_state_dict(saved["watch"])


def list_layers(model: nn.Module) -> list[tuple[str, str, int]]:
    """Return name, type and number of parameters of each module that has parameters of its own."""
    layers = []
    for name, module in model.named_modules():
        count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if count:
            layers.append((name, type(module).__name__, count))
    return layers
