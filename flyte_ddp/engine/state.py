"""The state of a training: weights, optimizer, schedule, average and progress; and its step."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from flyte_ddp.engine import collectives, torch_compat
from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.average import Average
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.best_models import BestModels
from flyte_ddp.engine.buffers import BufferCopy, Buffers
from flyte_ddp.engine.contracts import StepFigures, Training
from flyte_ddp.engine.digest import sum_bits, weights_digest
from flyte_ddp.engine.drift import Drift
from flyte_ddp.engine.measures import compute_ratios, make_checked_optimizer, trained_measure
from flyte_ddp.engine.monitor.best_tracker import BestTracker
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.monitor.trace import Trace
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.seeds import seed_all, seed_part
from flyte_ddp.engine.sharding.sharded_state import Layout, Shard, fitted
from flyte_ddp.engine.sharding.sharding import ShardedStep, is_sharded, local, update_own_rows
from flyte_ddp.engine.spikes import Spikes
from flyte_ddp.engine.step import ReplicatedStep, SingleStep, Step
from flyte_ddp.engine.sums import Sums
from flyte_ddp.engine.torch_compat import any_batch_size
from flyte_ddp.engine.virtual_ranks import ahead
from flyte_ddp.engine.virtual_ranks.ahead import Ahead
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.engine.virtual_ranks.gathered import Gathered, gather_by_part
from flyte_ddp.engine.virtual_ranks.sharded_step import ShardedExactStep
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import EpochFinished
from flyte_ddp.model_files.frozen_base import FrozenBase
from flyte_ddp.random_numbers import Use, derive_key
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed

BINS = 64  # of a histogram
MOST_NORMS = 10  # that a log line has, unless all gradients are logged


class TrainingState(Training):
    """The state that a checkpoint holds and a resume restores, and the step that changes it.

    Attributes:
        buffers: the buffers of the network.
        evaluated_buffers: those of the network that is evaluated, which may be the average.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        names: Sequence[str],
        progress: Progress,
        train: TrainBatches,
        device: torch.device,
        *,
        autocast: bool,
        total_steps: int,
        base: FrozenBase | None = None,
        moving: Iterable[str] = (),
        has_unused: bool = False,
        gathers: bool = False,
        average: Average | None = None,
        log_gradients: bool = False,
    ):
        """Set up the state of a training that begins.

        Args:
            recipe: the recipe, whose methods make optimizer and schedule.
            model: the network, on the rank's device.
            names: the names of the measures, "loss" first.
            progress: a new Progress.
            train: the batches of an epoch.
            device: the device of this rank.
            autocast: whether the network computes in bfloat16.
            total_steps: the number of steps of the whole training, for the schedule.
            base: the weights that model() has frozen, and that no checkpoint has; by default none.
            moving: the names of frozen weights that forward changes nevertheless.
            has_unused: whether a step may leave parameters unused on all ranks, as an expert's.
            gathers: whether the recipe calls all_gather().
            average: the moving average of the weights; None without one.
            log_gradients: whether events have the norm of each parameter's gradient.
        """
        self.recipe = recipe
        self.model = model
        self.names = tuple(names)
        self.train = train
        self.device = device
        self.base = base or FrozenBase(model)
        self.average = average
        self.log_gradients = log_gradients
        self.world_size = train.world_size
        self.micro_batch = recipe.micro_batch
        self.buffers = Buffers(model, moving)
        self.evaluated_buffers = Buffers(average.model, moving) if average else self.buffers
        virtual_ranks: int = recipe.settings.virtual_ranks
        self.precision = "bfloat16" if autocast else "float32"
        step = Step(self.model, recipe, self.names, self.world_size, autocast)
        self.parallel = _make_parallel(step, virtual_ranks, has_unused)
        if average and virtual_ranks and self.world_size > 1 and not is_sharded(model):
            # A copy from before the network had rank 0's weights
            collectives.broadcast_in_place((*average.model.parameters(), *average.model.buffers()))
        optimizer = make_checked_optimizer(recipe, model)
        given = {id(weight) for weight in chain.from_iterable(group["params"] for group in optimizer.param_groups)}
        # Trainable weights that are not trained all the same, by name
        self.left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
        self.layout = Layout(self.model, optimizer)
        # Other code in a step, such as a hook's, must see the gradients divided, and not run in a step that is left out
        is_plain = torch_compat.is_plain(optimizer)
        self.optimizer = update_own_rows(optimizer)
        # LambdaLR asks for the rate of a step after the last, for which a schedule has none
        last = total_steps - 1
        self.schedule = LambdaLR(self.optimizer, lambda step: recipe.lr_lambda(min(step, last), total_steps))
        # A loss or gradient that is not finite sets this flag for good. An optimizer that ignores it isn't called then
        self.flag = torch.zeros((), dtype=torch.float32, device=device)
        self.spikes = Spikes(recipe.settings.skip_spikes, device) if recipe.settings.skip_spikes else None
        # Whether an optimizer that can leaves its step out; with spikes it may be for this step alone
        self._is_left_out = torch.zeros_like(self.flag) if self.spikes else self.flag
        # What an optimizer divides the gradients by in its step, if it can, which saves a pass over them
        self._divisor = torch.ones((), dtype=torch.float32, device=device)
        self._is_guarded = is_plain and torch_compat.guard_steps(self.optimizer, self._is_left_out, self._divisor)
        named = model.named_parameters()
        self._trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._base_sums: list[int] | None = None  # before the first step
        self.gathers_by_part = gathers and virtual_ranks > 0
        self._gathered: Gathered | None = None  # in the current step
        # None where the host waits for the sums of each step
        self._ahead: Ahead | None = None
        changes_more = average or self.spikes or gathers or has_unused or is_sharded(model)
        if (
            isinstance(self.parallel, ExactStep)
            and device.type in ahead.DEVICES
            and self._is_guarded
            and not changes_more
        ):
            self._ahead = Ahead(self.parallel)
        self.progress = progress
        progress.measure(names)
        self._trained = 2 * self.names.index(trained_measure(names))
        self._norms = torch.zeros(0, dtype=torch.float32, device=device)
        self.best_tracker: BestTracker | None = None  # None without a validation split
        self.audit: Audit | None = None
        self.trace: Trace | None = None  # None without trace_every
        self.best_models: BestModels | None = None  # None without keep_best
        self.drift: Drift | None = None  # None on a rank that is alone

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated and returned: the average if there is one."""
        return self.average.model if self.average else self.model

    def train_step(self, shares: Sequence[Batch], stop: bool, save: bool = False) -> None:
        """Take one optimizer step with a global batch, and add its measures and requests to the progress; a collective.

        The step computes the gradients of the mean over the global batch, clips them if the recipe says so, updates the
        weights, the learning rate and the moving average, broadcasts rank 0's buffers, and adds 1 to progress.step.
        Gradients stay until the next step.

        If the loss or a gradient is not finite, weights stay as they are on all ranks, in this step and all later ones.
        Progress.end_step() raises the error, not this method. With settings.skip_spikes, a step whose gradients leap
        changes neither the weights nor the average.

        The host waits for the device if the optimizer is not fused, or if there are both an average and skip_spikes.
        With virtual ranks, or frozen weights, it waits in some steps.

        Args:
            shares: this rank's samples of the global batch: a list of one Batch, or with virtual ranks of one for each
                of this rank's parts.
            stop: whether this rank asks all ranks to stop.
            save: whether this rank asks for a checkpoint.
        """
        if self._base_sums is None:
            self._base_sums = self._sum_base()
        self.parallel.zero_grad()  # here rather than at the end, so that gradients can be inspected until the next step
        before = self.buffers.copy() if isinstance(self.parallel, ExactStep) else None
        if before and self.gathers_by_part:
            self._gathered = self._gather(shares, before)
        backward = partial(self._backward, (stop, save), before)
        if self.trace:
            self.trace.begin({"": self.model}, self.progress.epoch, self.progress.step, len(self.train))
        if self._ahead and before and self._may_run_ahead():
            sums = self.progress.sums
            totals = self._ahead.add_up_gradients(self.schedule.last_epoch, partial(backward, shares), before, sums)
        elif self.audit:
            totals = self.audit.add_up_gradients(backward, shares, self.progress.epoch, self.progress.step)
        else:
            totals = self.parallel.add_up_gradients(partial(backward, shares))
        if self.trace:
            self.trace.record_gradients()
            self.trace.end()
        # The totals have the same bits on all ranks, and so have flag, scale and clipping, which follow from them. So
        # either all ranks step or none, without another exchange. The host does not wait for the device, either: a
        # guarded optimizer (_is_guarded) reads the flag there
        measured = totals.measured
        self.buffers.broadcast()
        seed_all(derive_key(Use.OWN_STEP, shares[0].seed, 1))  # an optimizer may draw, alike on all ranks
        scale = measured[self._trained + 1].reciprocal().nan_to_num_(posinf=0.0)  # 0 if the weights add up to 0
        self._norms = totals.norms * scale
        norm = torch.linalg.vector_norm(self._norms)
        total = norm + measured[self._trained] + measured[self._trained + 1]
        self.flag.logical_or_(total - total)  # 0 if finite, else NaN, which counts as true
        self.progress.sums.add(totals, self.flag)
        if self.spikes:
            self._is_left_out.copy_(self.spikes.judge(norm).logical_or(self.flag))
        if self.recipe.clip_norm:
            scale = scale * (self.recipe.clip_norm / norm).clamp(max=1)
        if self._is_guarded:
            torch.reciprocal(scale, out=self._divisor)
            self.optimizer.step()
        elif not self._is_left_out:
            torch_compat.scale(self._gradients()[1], scale)
            self.optimizer.step()
        self.schedule.step()
        if self.average and not (self.spikes and self._is_left_out):  # with spikes the host waits for the device
            self.average.update(self.model, self.schedule.last_epoch - 1)
        self.progress.step += 1
        self.progress.clock.lap(StepPart.COMPUTING)

    def _may_run_ahead(self) -> bool:
        """Return whether the host may take the coming step without waiting for the device."""
        is_due = self.audit and self.audit.is_due(self.progress.epoch, self.progress.step)
        return not (self.trace or is_due) and bool(self._ahead and self._ahead.may(self.schedule.last_epoch))

    def go_back(self, step: int) -> bool:
        """Restore the training as it was before a step that has failed, if the step may succeed when taken again.

        With virtual ranks, gradients may not fit the fixed-point units that were predicted for the step, which the host
        learns some steps later. After this call, progress.step is `step`, and the caller takes the steps again from
        there.

        Args:
            step: the first step of the current epoch, from 0, that has failed.

        Returns:
            True if the training was restored. False, without any change, if the host has waited for that step's sums,
            as always without virtual ranks: then the step failed because a number was not finite.
        """
        number = self.schedule.last_epoch - (self.progress.step - step)
        if not (self._ahead and self._ahead.go_back(number, self.progress.sums)):
            return False
        self.flag.zero_()
        self.progress.step = step
        self.schedule.last_epoch = number - 1
        self.schedule.step()
        return True

    def _backward(self, asked: tuple[bool, bool], before: BufferCopy | None, shares: Sequence[Batch]) -> None:
        """Run the forward and backward passes of this rank's shares, and add up the gradients in the weights' `grad`.

        With virtual ranks each share begins with the same buffers, and in the end the buffers are as the first share
        has left them.

        Args:
            asked: whether this rank asks to stop, and to save; they are sent with the gradients.
            before: a copy of the buffers before the step; None without virtual ranks.
            shares: this rank's shares of the global batch. Each is computed in micro-batches.
        """
        after: BufferCopy | None = None
        clock = self.progress.clock
        if self.trace:
            self.trace.begin_backward()
        for share in shares:
            if before:
                before.put_back()
            parts = self.cut_up(share)
            for number, part in enumerate(parts, 1):
                is_last = share is shares[-1] and number == len(parts)
                # Batch norm's variance of a single value is NaN
                before_part = self.buffers.copy() if part.share.count == 1 else None
                if self.trace and not part.share.borrowed:
                    self.trace.begin_part(share.share.part, part.tree)
                with any_batch_size(), nullcontext() if is_last else self.parallel.no_sync():
                    loss = self.parallel(part, asked, is_last)
                    if self.trace:
                        self.trace.end_part(loss)
                    if self.world_size > 1:
                        torch_compat.after_backward(loss, partial(clock.lap, StepPart.COMPUTING))
                    loss.backward()
                    clock.lap(StepPart.WAITING if self.world_size > 1 else StepPart.COMPUTING)
                if before_part:
                    before_part.replace_not_finite()
            after = after or (self.buffers.copy() if before else None)
            self.parallel.finish_part(share is shares[-1])
        if after:
            after.put_back()

    def cut_up(self, share: Batch) -> list[Batch]:
        """Seed the global random generators for a share of the global batch, and cut the share into micro-batches.

        Returns:
            Batches of at most self.micro_batch samples; a single one if that is 0. Without virtual ranks all ranks get
            equally many: a rank with fewer samples gets copies, marked as borrowed, which count for nothing. With
            virtual ranks, all_gather() returns in each batch the rows that train_step has gathered for the step.
        """
        seed_part(share.seed, share.share.part)
        parts = self.parallel.parts(share, self.micro_batch)
        return [self._gathered.with_known_rows(part) for part in parts] if self._gathered else parts

    @torch_compat.only_deterministic()
    def _gather(self, shares: Sequence[Batch], before: BufferCopy) -> Gathered | None:
        """Compute the rows of the global batch that all_gather() will return in this step; a collective.

        Call this with virtual ranks only.

        Args:
            shares: this rank's parts of the global batch.
            before: a copy of the buffers, with which each forward pass begins.

        Returns:
            The rows, and the gradients of the loss with respect to them; None if the recipe does not call all_gather().
        """
        step = self.parallel.module
        parts = [*chain.from_iterable(self.parallel.parts(share, 0) for share in shares)]
        with any_batch_size():
            return gather_by_part(self.recipe, step.outputs, step.trained, parts, before.put_back)

    def gradient_norms(self) -> dict[str, float]:
        """Return the Euclidean norm of each parameter's gradient in the last step, before clipping, by name.

        The host waits for the device.
        """
        return dict(zip(self._gradients()[0], self._norms.tolist(), strict=True))

    def gradient_histograms(self) -> dict[str, tuple[list[float], list[float]]]:
        """Return a histogram of each parameter's gradient in the last step, after clipping, by name.

        The host waits for the device. Call it only without sharding.

        Returns:
            The counts of BINS equal bins, and the BINS + 1 edges of the bins. The dict is empty if the step's update
            was left out.
        """
        histograms: dict[str, tuple[list[float], list[float]]] = {}
        if self._is_left_out:
            return histograms
        for name, gradient in zip(*self._gradients(), strict=True):
            # Float32 may have no edges of bins between two values that are next to one another
            counts, edges = np.histogram(gradient.cpu().double().numpy(), BINS)
            histograms[name] = counts.tolist(), edges.tolist()
        return histograms

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        """Return names and gradients of the parameters that have gradients; of a sharded network, this rank's rows."""
        named = [(name, local(p.grad)) for name, p in self._trainable if p.grad is not None]
        return [name for name, _ in named], [gradient for _, gradient in named]

    def measures(self, pairs: Sequence[float]) -> dict[str, float]:
        return compute_ratios(self.recipe, self.names, pairs)

    def samples(self, sums: Sums) -> int:
        return self.train.samples_until(sums.steps)

    def figures(self) -> StepFigures:
        """Return the last step's learning rate, norms of gradients, and number of updates left out so far.

        The host waits for the device. Norms are those before clipping. Norms by name are those of all parameters if
        log_gradients is set, otherwise the MOST_NORMS largest.
        """
        norms = self.gradient_norms()
        learning_rate = float(self.schedule.get_last_lr()[0])
        largest = dict(heapq.nlargest(MOST_NORMS, norms.items(), itemgetter(1)))
        left_out = self.spikes.count() if self.spikes else self.progress.skipped_updates
        shown = norms if self.log_gradients else largest
        return StepFigures(learning_rate, math.hypot(*norms.values()), shown, left_out)

    def step_error(self, step: int) -> NonFiniteError:
        """Repeat a step, and return an error that names what was not finite, and on which ranks; a collective.

        The step itself cannot tell, because its gradients are those of all ranks together. Weights and their `grad`
        stay as they are; buffers and the states of the random generators change.

        Args:
            step: the first step of the current epoch, from 0, with a number that was not finite. The weights have not
                changed since.

        Returns:
            An error about the loss, with the ranks whose loss is not finite. If all losses are finite, the error is
            about the gradient, with the ranks whose own gradients are not finite. If these are finite, too, or the
            network is sharded, the error names all ranks.
        """
        epoch = self.progress.epoch
        is_bad = {"loss": False, "gradient": False}
        weights = [] if is_sharded(self.model) else self.parallel.module.trainable  # ranks add up gradients at once
        shares = next(self.train.steps(epoch, step))
        if self._gathered:  # of a later step, if the host was ahead of the device
            self._gathered = self._gather(shares, self.buffers.copy())
        for share in shares:
            for part in self.cut_up(share):
                with any_batch_size():
                    loss = self.parallel.module(part, (False, False), False)
                    gradients = torch.autograd.grad(loss, weights, allow_unused=True) if weights else ()
                is_bad["loss"] |= not loss.isfinite()
                norms = [torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None]
                is_bad["gradient"] |= not all(norm.isfinite() for norm in norms)
        by_rank = collectives.gather_values(is_bad)
        for what in is_bad:
            ranks = [rank for rank, is_bad_there in enumerate(by_rank) if is_bad_there[what]]
            if ranks:
                return NonFiniteError.in_step(what, ranks, epoch, step)
        return NonFiniteError.in_step("gradient", [*range(self.world_size)], epoch, step)  # in sum, or sharded

    def choose(self, finished: EpochFinished) -> None:
        """Keep the weights of the last evaluation if they are among the best; a collective with options.keep_best.

        With a validation split, the best weights are kept in memory, by best_tracker. With keep_best, best_models keeps
        the best few in files.

        Args:
            finished: the evaluation, which must be the last in progress.history.
        """
        if self.best_tracker:
            weights = {name: local(weight) for name, weight in self.base.without(self.evaluated).items()}
            self.best_tracker.after_evaluation(len(self.progress.history) - 1, finished.validation, weights)
        if self.best_models:
            self.best_models.after_evaluation()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resume needs.

        Tensors are the training's own, which the next step changes. In place of sharded tensors are Shards, which have
        this rank's rows.
        """
        content = {
            "model": self.base.without(self.model),
            "base": self.base.digest,
            "average": self.base.without(self.average.model) if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": self.progress.state_dict(),
            "grid": self.parallel.grid if isinstance(self.parallel, ExactStep) else None,
            "micro_batch": self.micro_batch,
            "precision": self.precision,
            "spikes": self.spikes.values if self.spikes else None,
            "choice": self.best_tracker.state_dict() if self.best_tracker else None,
        }
        return self.layout.with_shards(content)

    def evaluated_weights(self) -> dict[str, Tensor | Shard]:
        """Return the weights of the network that is evaluated, without the base."""
        content = self.layout.with_shards({"model": self.base.without(self.evaluated)})
        weights: dict[str, Tensor | Shard] = content["model"]
        return weights

    def best_weights(self) -> dict[str, Tensor | Shard]:
        """Return the weights of the best evaluation so far, without the base."""
        assert self.best_tracker
        content = self.layout.with_shards({"choice": {"weights": self.best_tracker.weights}})
        weights: dict[str, Tensor | Shard] = content["choice"]["weights"]
        return weights

    def compare_between_ranks(self) -> None:
        """Check that all ranks have the same weights, and that frozen weights have not changed; a collective.

        Call this between steps, before each checkpoint and evaluation. With audits, the average and the optimizer's
        state are compared, too. With sharding only the frozen weights are checked, because ranks have different rows.

        Raises:
            InputError: A frozen weight that checkpoints leave out was changed.
            WrongBitsError: The ranks' weights differ, although they have the same hardware. On different hardware there
                is a warning instead.
        """
        if self._base_sums not in (None, self._sum_base()):
            raise InputError(
                f"frozen weights ({listed(sorted(self.base.names))}) must change from the first step on or never, as "
                "no checkpoint has them otherwise, and some have begun to change: make them buffers, by register_buffer"
            )
        if not self.drift or is_sharded(self.model):
            return
        is_audited = bool(self.audit and self.audit.every)
        parts = ("model", "average", "optimizer") if is_audited else ("model",)
        what = "weights, or the optimizer," if is_audited else "weights"
        content = self.state_dict()
        leaves = torch_compat.pytree.tree_leaves([content[part] for part in parts])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.drift.compare(tensors, what, self.progress.epoch, self.progress.step - 1)

    def _sum_base(self) -> list[int]:
        """Return a checksum of each weight that model() has frozen, and that no checkpoint has.

        The checksums are in the order of the weights' names. The list is empty if there are no such weights.
        """
        if not self.base.names:
            return []
        # Torch's own count of a tensor's changes would miss a change by `.data`
        weights = self.model.state_dict()
        sums = [sum_bits(local(weights[name])).to(self.device) for name in sorted(self.base.names)]
        return torch.stack(sums).tolist()

    def digest(self) -> str:
        """Return the digest of the weights that are evaluated, 16 hex digits; a collective."""
        return weights_digest(self.evaluated_weights(), self.base.digest, self.device)

    def load_weights(self, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Load weights, without those that model() has frozen, into the network or its moving average.

        For a sharded weight they have this rank's rows.
        """
        self.base.load(network, fitted(weights, network))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what state_dict has returned, on any number of ranks.

        Args:
            saved: the state, with this rank's rows of each sharded tensor. The optimizer and best_tracker keep its
                tensors, so the caller must not use them any more.
        """
        self.load_weights(self.model, saved["model"])
        if self.average:
            self.load_weights(self.average.model, saved["average"])
        optimizer = saved["optimizer"]
        if self._is_guarded:  # also if a device without fused kernels has written the checkpoint
            groups = [{**group, "foreach": None, "fused": True} for group in optimizer["param_groups"]]
            optimizer = {**optimizer, "param_groups": groups}
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(saved["schedule"])
        self.progress.load_state_dict(saved["progress"])
        if isinstance(self.parallel, ExactStep):
            self.parallel.grid = saved["grid"]
        if self.recipe.micro_batch < 0:
            self.micro_batch = saved["micro_batch"]
        if self.best_tracker:
            self.best_tracker.load_state_dict(saved["choice"])
        if self.spikes:
            self.spikes.values.copy_(saved["spikes"])


def _make_parallel(step: Step, virtual_ranks: int, has_unused: bool) -> SingleStep:
    """Return the step of all ranks together: sharded, by virtual ranks, replicated, or that of a single rank."""
    if is_sharded(step.model):
        return ShardedExactStep(step, virtual_ranks) if virtual_ranks else ShardedStep(step, has_unused)
    if virtual_ranks:
        return ExactStep(step, virtual_ranks)
    return ReplicatedStep(step, has_unused) if step.world_size > 1 else SingleStep(step)
