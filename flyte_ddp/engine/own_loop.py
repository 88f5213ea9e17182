"""A training loop of the user's own: a function that each rank calls, with the parts of the engine that it needs.

def train(loop: Loop) -> None:
    model = loop.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    train, test = loop.batches(TrainSet()), loop.evaluation(TestSet())
    loop.keep(model=model, optimizer=optimizer)
    for epoch in loop.epochs():
        for inputs, labels in train:
            ...
            loop.after_step(loss=loss)
        loop.after_epoch(accuracy=...)
"""

import inspect
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.engine.batches.batches import EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.checkpoints.checkpoint import check_readable
from flyte_ddp.engine.checkpoints.same_state import state_on_all_ranks
from flyte_ddp.engine.checkpoints.writer import whole_checkpoints
from flyte_ddp.engine.digest import weights_digest
from flyte_ddp.engine.garbage import collected_between
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.load import data_path_of, seed_all, split_of
from flyte_ddp.engine.machine import hardware, machine, moved
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.monitor.step_clock import StepClock, StepPart
from flyte_ddp.engine.monitor.stragglers import Stragglers
from flyte_ddp.engine.results import export_model, layers_of
from flyte_ddp.engine.step import Totals
from flyte_ddp.engine.sums import StepSums, Sums
from flyte_ddp.engine.torch_compat import norms, pytree
from flyte_ddp.errors import InputError, NonFiniteError, StopRequested
from flyte_ddp.events import EpochFinished, RunStarted, StepLogged, digests_of
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.random_numbers import Use, key_of
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.whole_files import writing_to

# What a loop decides for itself, or cannot have: set to anything else, it would have no effect
UNUSED = {
    TrainingSettings: (
        "virtual_ranks", "stop_after", "evaluations_per_epoch", "validation_fraction", "choose_by", "patience",
        "minimum_delta", "freeze", "init_leave_out",
    ),
    RunOptions: ("profile", "log_gradients", "keep_best", "sharding", "compile"),
}  # fmt: skip


class Loop:
    """What the ranks give to a loop of your own. All of them call its methods alike: most ask the other ranks.

    Attributes:
        settings: those that the training was given.
        data_path, init_path: the file or folder that it was given as data and as init; None without one.
        rank, world_size: this process among all of them; rank 0 writes.
        device: of this rank, on which its batches are.
        epoch: from 0.
        step: how many steps of the epoch are done.
    """

    def __init__(self, environment: Environment, device: torch.device, link: Link, job: Job, cache: BlockCache):
        self.settings, self.data_path, self.init_path = job.settings, data_path_of(job.data), job.init
        self.rank, self.world_size, self.device = environment.rank, environment.world.size, device
        self.epoch, self.step = 0, 0
        self._environment, self._link, self._job, self._cache = environment, link, job, cache
        self._parts: dict[str, Any] = {}
        self._train: _TrainSteps | None = None
        self._started: RunStarted | None = None
        self._logged: dict[str, Tensor] = {}  # of the current step
        self._evaluated: dict[str, float] = {}  # of the current epoch
        self._names: list[str] = []
        self._is_evaluating, self._evaluations = False, 0  # the latter: samples of all evaluations
        self._history: list[EpochFinished] = []
        self._ran_on: list[dict[str, Any]] = []
        self._monitor = LossMonitor(remedies="lower the learning rate, or clip gradients")
        self._clock = StepClock(device)
        self._writer = whole_checkpoints(environment, link.emit, job)
        self._epoch_seconds = 0.0
        self._set_to_zero(0)

    # --- before the first epoch ---

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The network on the rank's device, in torch's DistributedDataParallel."""
        return _Replicated(model.to(self.device), self)

    def batches(self, data: Any) -> "_TrainSteps":
        """This rank's part of each global batch of settings.batch_size, in an order of each epoch's own.

        Iterate over it once an epoch; a resumed training begins with the step that comes next.

        data: what Recipe.data returns. A last batch that is not full is left out, as each rank must have as many
        samples: DistributedDataParallel weighs the ranks alike.
        """
        self._train = _TrainSteps(self, self._split(data))
        return self._train

    def evaluation(self, data: Any) -> "_Evaluation":
        """This rank's part of the data, in batches of settings.test_batch_size samples, all ranks together; each sample
        comes once, whatever the number of ranks."""
        return _Evaluation(self, self._split(data))

    def autocast(self) -> torch.autocast:
        """The context in which settings.precision is computed; auto is float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")

    def keep(self, model: nn.Module, **parts: Any) -> None:
        """Names all that changes while you train, and restores it from the checkpoint of an earlier attempt.

        model: its weights are what the training returns. parts: whatever else has state_dict and load_state_dict:
        optimizers, schedules, averages, scalers.
        """
        given = {"model": model, **parts}
        for name, part in given.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise InputError(
                    f"loop.keep: {name} must have state_dict and load_state_dict, got {type(part).__name__}"
                )
        self._parts = {
            name: part.module if isinstance(part, DistributedDataParallel) else part for name, part in given.items()
        }
        for part in self._parts.values():
            if isinstance(part, torch.optim.Optimizer):
                part.register_step_pre_hook(self._look_at_gradients)
        check_readable(self.state_dict())
        saved = state_on_all_ranks(self._job, self._link.emit, self.device)
        if saved:
            try:
                self._load(pytree.tree_map_only(Tensor, Tensor.clone, saved))
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"the checkpoint does not fit what loop.keep was given: {' '.join(str(error).split())}: keep the "
                    "same, or drop it by RunOptions(resume=False)"
                ) from None

    # --- while training ---

    def epochs(self, headline: str = "loss", percent: Sequence[str] = ()) -> Iterator[int]:
        """The epochs that are still to be trained, up to settings.epochs.

        headline: the name of the measure that the training is judged by. percent: those from 0 to 1 that are shown in
        per cent.
        """
        self._start(headline, tuple(percent))
        while self.epoch < self.settings.epochs:
            yield self.epoch
            self._end_epoch()

    def log(self, **measures: Tensor | float) -> None:
        """Once in each step: "loss" and whatever else is to be followed, means of the rank's samples.

        They are told as means of all ranks and of the steps since the last log; nothing waits for the device.
        """
        self._logged = {
            name: torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
            for name, value in measures.items()
        }
        if "loss" not in measures or (self._names and {*self._names} != {*measures}):
            names = ", ".join(self._names) or "loss"
            raise InputError(f"loop.log must have the same measures in each step: {names}, got {', '.join(measures)}")

    def evaluated(self, **measures: Tensor | float | tuple[Tensor | float, Tensor | float]) -> dict[str, float]:
        """Once in each epoch: its measures. Returns them for all ranks' samples together; a collective.

        Each is a value, or values, of this rank, or a pair of these and their weights: (correct, samples), say. What
        counts is the sum of all ranks' values, over that of their weights.
        """
        pairs = [value if isinstance(value, tuple) else (value, _ones_like(value)) for value in measures.values()]
        sums = torch.tensor(
            [[float(torch.as_tensor(one).sum()) for one in pair] for pair in pairs], dtype=torch.float64
        )
        sums = sums.to(self.device)
        distributed.all_reduce(sums)
        self._evaluated = {name: value / weight for name, (value, weight) in zip(measures, sums.tolist(), strict=True)}
        return self._evaluated

    # --- what happens around the user's code ---

    def _split(self, data: Any) -> Any:
        return split_of(data, "data", self.device, self._job.options, self._cache)

    def _start(self, headline: str, percent: tuple[str, ...]) -> None:
        if not self._train or not self._parts:
            missing = "loop.batches" if not self._train else "loop.keep"
            raise InputError(f"call {missing} before loop.epochs: a checkpoint could not be resumed without")
        environment, job, train, world = self._environment, self._job, self._train, self._environment.world
        precision = "bfloat16" if self.settings.precision == "bfloat16" else "float32"
        self._ran_on, moves = moved(self._ran_on, machine(environment, self.device, precision, job.options))
        hosts = [""] * world.size
        distributed.all_gather_object(hosts, environment.host)
        self._stragglers = Stragglers(hosts, train.batches.split.remedy, meet_within=True)  # in the backward pass
        self._started = RunStarted(
            dataset=job.dataset,
            samples="samples",
            headline=headline,
            percent=percent,
            train_samples=len(train.batches.split),
            test_samples=self._evaluations,
            samples_per_epoch=len(train) * train.batches.batch_size,
            world_size=world.size,
            backend=world.backend,
            device=str(self.device),
            precision=precision,
            epochs=self.settings.epochs,
            steps_per_epoch=len(train),
            first_epoch=self.epoch,
            first_step=self.step,
            startup_seconds=time.time() - job.launched,
            layers=layers_of(self._parts["model"]),
            remarks=["a loop of your own", *moves],
            hosts=hosts,
            identity=job.identity,
            ran_on=self._ran_on,
            earlier=digests_of(self._history),
        )
        self._link.emit(self._started)
        self._since = time.perf_counter()

    def _set_to_zero(self, measures: int) -> None:
        self._sums, self._flag = StepSums(measures, self.device), torch.zeros((), dtype=torch.bool, device=self.device)
        self._last = self._told = Sums((0.0,) * 2 * measures, 0, 0, uneven=False, stop=False, saves=0, seconds=0.0)

    def _end_step(self) -> None:
        """Once the user's code has done all that belongs to the step; a collective."""
        self._clock.lap(StepPart.COMPUTING)
        if not self._logged:
            raise InputError("call loop.log(loss=...) once in each step")
        if not self._names:
            self._names = [*self._logged]
            self._set_to_zero(len(self._names))
        values = torch.stack([self._logged[name] for name in self._names])
        asked = values.new_tensor([float(self._link.stop_requested), float(self._writer.due())])
        total = torch.cat([values, asked])
        distributed.all_reduce(total)
        self._clock.lap(StepPart.WAITING)
        values, asked = total[:-2], total[-2:]
        self._flag.logical_or_((values - values).sum())  # 0 if finite, else NaN, which counts as true
        measured = torch.stack([values, torch.full_like(values, self.world_size)], 1).flatten()
        self._sums.add(Totals(measured, measured[:0], None, asked, measured[:0]), self._flag)
        own, self._logged, is_logged = self._logged, {}, self._is_logged
        self.step += 1
        self._link.heartbeat()
        assert self._train
        is_last = self.step == len(self._train)
        seconds = self._epoch_seconds + time.perf_counter() - self._since
        recent = self._sums.recent(self.step, seconds)
        if not is_logged and not (recent and recent.asks(self._last)):
            return
        before, self._last = self._last, self._sums.now(self.step, seconds)
        if self._last.steps < self.step:
            raise NonFiniteError.in_step("loss", self._ranks_of_bad(own), self.epoch, self._last.steps)
        if is_logged:
            self._tell()
        if self._last.stop or (self._last.saves > before.saves and not is_last):
            self._save(self._last.stop)
        if self._last.stop:
            raise StopRequested(self.epoch, self.step)

    def _begin_step(self) -> None:
        groups = [group for part in self._parts.values() for group in getattr(part, "param_groups", ())]
        self._rate, self._norm = float(groups[0]["lr"]) if groups else 0.0, 0.0

    @property
    def _is_logged(self) -> bool:
        """Whether the step that comes next is."""
        assert self._train
        return (self.step + 1) % self.settings.log_interval == 0 or self.step + 1 == len(self._train)

    def _look_at_gradients(self, *_: Any) -> None:
        """Before the user's optimizer steps, since they may be gone then; a look makes a GPU's host wait."""
        gradients = [weight.grad for weight in self._parts["model"].parameters() if weight.grad is not None]
        if self._is_logged and gradients:
            self._norm = float(norms(gradients).norm())

    def _ranks_of_bad(self, own: dict[str, Tensor]) -> list[int]:
        bad: list[Any] = [None] * self.world_size
        distributed.all_gather_object(bad, not all(bool(value.isfinite()) for value in own.values()))
        return [rank for rank, is_bad in enumerate(bad) if is_bad] or [*range(self.world_size)]

    def _tell(self) -> None:
        """Of the steps since this was last done; a collective."""
        now, before = self._last, self._told
        self._told = now
        samples, batch_size = (now.step - before.step) * self.settings.batch_size, self.settings.batch_size
        measures = self._means(now.since(before))
        self._link.emit(
            StepLogged(
                epoch=self.epoch,
                step=self.step,
                samples=self.step * batch_size,
                measures=measures,
                learning_rate=self._rate,
                samples_per_second=samples / max(now.seconds - before.seconds, 1e-9),
                gradient_norms={},
                gradient_norm=self._norm,
            )
        )
        for warning in self._monitor.after_steps(self.epoch, self.step, measures["loss"], samples):
            self._link.emit(warning)
        steps, times = self._clock.steps, self._clock.read_all()
        self._sums.readback.keep_pace(float(times[:, : StepPart.OTHER].sum(1).max()) / max(steps, 1))
        slow = self._stragglers.after_steps(self.epoch, self.step, steps, times)
        self._monitor.warnings += slow
        for event in (self._stragglers.so_far(), *slow) if slow else ():
            self._link.emit(event)

    def _means(self, pairs: Sequence[float]) -> dict[str, float]:
        return {name: pairs[2 * n] / pairs[2 * n + 1] for n, name in enumerate(self._names) if pairs[2 * n + 1]}

    def _end_epoch(self) -> None:
        """A collective."""
        assert self._started
        assert self._train
        if self._logged:  # the loop was left in the middle of an epoch
            self._end_step()
        if self._started.headline not in self._evaluated:
            raise InputError(f"call loop.evaluated({self._started.headline}=...) at the end of each epoch")
        seconds = self._last.seconds
        finished = EpochFinished(
            epoch=self.epoch,
            samples=self.step * self.settings.batch_size,
            train=self._means(self._last.pairs),
            test=self._evaluated,
            train_seconds=seconds,
            evaluate_seconds=time.perf_counter() - self._since + self._epoch_seconds - seconds,
            fraction=self.step / len(self._train),
            digest=weights_digest(self._parts["model"].state_dict(), device=self.device),
        )
        self._history.append(finished)
        self._evaluated = {}
        self._link.emit(finished)
        self._link.emit(self._stragglers.so_far())
        self.epoch, self.step, self._epoch_seconds = self.epoch + 1, 0, 0.0
        self._set_to_zero(len(self._names))
        self._save(self.epoch == self.settings.epochs)
        self._since = time.perf_counter()

    def _save(self, is_last: bool) -> None:
        self._link.heartbeat(WRITING)
        self._writer.save(self, is_last)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs; tensors are those of the training itself, which the next step changes."""
        return {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "epoch": self.epoch,
            "step": self.step,
            "names": self._names,
            "sums": self._sums.values,
            "told": asdict(self._told),
            "epoch_seconds": self._last.seconds,
            "history": [asdict(finished) for finished in self._history],
            "ran_on": self._ran_on,
            "watch": self._monitor.state_dict(),
        }

    def _load(self, saved: dict[str, Any]) -> None:
        if saved["parts"].keys() != self._parts.keys():
            raise ValueError(f"it has {', '.join(saved['parts'])}")
        for name, part in self._parts.items():
            part.load_state_dict(saved["parts"][name])
        self.epoch, self.step, self._names = saved["epoch"], saved["step"], saved["names"]
        self._set_to_zero(len(self._names))
        self._sums.values[: 2 * len(self._names)] = saved["sums"][: 2 * len(self._names)].to(self.device)
        self._told, self._epoch_seconds = Sums(**saved["told"]), saved["epoch_seconds"]
        self._history = [EpochFinished(**finished) for finished in saved["history"]]
        self._ran_on = saved["ran_on"]
        self._monitor.load_state_dict(saved["watch"])

    def finish(self) -> TrainingResult:
        """Once the user's function has returned: rank 0 writes the weights; a collective."""
        if not self._started:
            raise InputError(f"{self._job.recipe} must train in `for epoch in loop.epochs():`, and has not called it")
        if self._evaluated:  # the loop over the epochs was left
            self._end_epoch()
        self._link.heartbeat(WRITING)
        self._writer.close()
        job, model = self._job, self._parts["model"]
        digest = weights_digest(model.state_dict(), device=self.device)
        if self.rank == 0:
            with writing_to(Path(job.model_path).parent, job.chosen_by):
                export_model(model.state_dict(), Path(job.model_path))
        return TrainingResult(
            epochs=self._history,
            warnings=self._monitor.warnings,
            headline=self._started.headline,
            train_samples=self._started.train_samples,
            test_samples=self._evaluations,
            precision=self._started.precision,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_gpu_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
            tested=self._history[-1].test if self._history else {},
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            hardware=hardware(self.device),
            digest=digest,
        )

    def close(self) -> None:
        self._link.heartbeat(WRITING)
        self._writer.close()


class _Replicated(DistributedDataParallel):
    """DistributedDataParallel; where nothing is trained, the network by itself: ranks need not evaluate alike."""

    def __init__(self, model: nn.Module, loop: Loop):
        super().__init__(model)
        self._loop = [loop]  # not among the modules

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._loop[0]._is_evaluating or not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]


class _TrainSteps:
    """A rank's trees of tensors, step by step."""

    def __init__(self, loop: Loop, split: Any):
        settings, self._loop = loop.settings, loop
        if settings.batch_size % loop.world_size:
            raise InputError(
                f"{type(settings).__name__}.batch_size must be a multiple of the number of ranks ({loop.world_size}) "
                f"in a loop of your own, got {settings.batch_size}: DistributedDataParallel weighs the ranks alike, so "
                "change one of them, or write a recipe"
            )
        self.batches = TrainBatches(split, settings.batch_size, settings.seed, loop.rank, loop.world_size)
        if not len(self):
            raise InputError(
                f"{type(settings).__name__}.batch_size must be at most the number of samples ({len(split)}), got "
                f"{settings.batch_size}: lower it"
            )

    def __len__(self) -> int:
        return len(self.batches.split) // self.batches.batch_size

    def __iter__(self) -> Iterator[Any]:
        loop, key = self._loop, partial(key_of, Use.OWN_STEP, self._loop.settings.seed)
        if not loop._started:
            raise InputError("iterate over loop.batches within `for epoch in loop.epochs():`")
        steps = self.batches.steps(loop.epoch, loop.step, len(self))
        for (batch,) in collected_between(loop._clock.timed(steps)):
            loop._begin_step()
            seed_all(key(loop.epoch, loop.step, 1 + loop.rank))  # as in a training that has not been interrupted
            yield batch.tree
            loop._end_step()
            seed_all(key(loop.epoch, loop.step))  # what is drawn outside of steps is the same on all ranks


class _Evaluation:
    """A rank's trees of tensors for one evaluation."""

    def __init__(self, loop: Loop, split: Any):
        size = loop.settings.test_batch_size
        self._loop, self._batches = loop, EvaluationBatches(split, size, loop.rank, loop.world_size)
        loop._evaluations += len(split)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        if loop._logged:  # the steps were left in the middle of an epoch
            loop._end_step()
        for buffer in loop._parts["model"].buffers() if loop._parts else ():
            distributed.broadcast(buffer.data, 0)  # as DistributedDataParallel does before a step
        loop._is_evaluating = True
        try:
            for batch in self._batches:
                loop._link.heartbeat()
                if not batch.share.borrowed:
                    yield batch.tree
        finally:
            loop._is_evaluating = False


def _ones_like(value: Tensor | float) -> float:
    return float(value.numel()) if isinstance(value, Tensor) else 1.0


def run(function: Any, environment: Environment, device: torch.device, link: Link, job: Job) -> TrainingResult:
    """Calls the user's function as this rank of the process group. InputError for what it cannot be given."""
    _check_unused(job)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InputError(f"{job.recipe} must take one argument, the loop, as in def train(loop): {error}") from None
    with BlockCache(environment, job.options.cache_bytes) as cache:
        loop = Loop(environment, device, link, job, cache)
        try:
            function(loop)
            return loop.finish()
        except NonFiniteError:  # raised on all ranks at once; the first report of it ends them all
            loop.close()
            distributed.barrier()
            raise
        finally:
            loop.close()


def _check_unused(job: Job) -> None:
    for kind, names in UNUSED.items():
        defaults, values = kind(), job.settings if kind is TrainingSettings else job.options
        for name in names:
            value = getattr(values, name)
            if value != getattr(defaults, name):
                raise InputError(
                    f"{type(values).__name__}.{name} must be {getattr(defaults, name)!r} for a loop of your own, which "
                    f"it would have no effect on, got {value!r}: leave it out, or write a recipe"
                )
