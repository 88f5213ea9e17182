"""The state of a training: weights, optimizer, schedule, average and progress; and its step."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.optim.lr_scheduler import LambdaLR

from flyte_ddp.engine import rank_0s, torch_compat
from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.average import Average
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.best_models import BestModels
from flyte_ddp.engine.buffers import Buffers, KeptBuffers
from flyte_ddp.engine.digest import weights_digest
from flyte_ddp.engine.drift import Drift
from flyte_ddp.engine.measures import own_optimizer, ratios, trained_measure
from flyte_ddp.engine.monitor.best_tracker import BestTracker
from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.engine.parallel import make_parallel
from flyte_ddp.engine.progress import Progress, StepFigures
from flyte_ddp.engine.seeds import seed_all, seed_part
from flyte_ddp.engine.sharding.sharded_state import Layout, Shard, fitted
from flyte_ddp.engine.sharding.sharding import is_sharded, local, on_shards
from flyte_ddp.engine.step import Step
from flyte_ddp.engine.sums import Sums
from flyte_ddp.engine.torch_compat import any_batch_size, version
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.engine.virtual_ranks.gathered import Gathered, gathered
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import EpochFinished
from flyte_ddp.model_files.frozen_base import FrozenBase
from flyte_ddp.random_numbers import Use, derive_key
from flyte_ddp.recipe import Recipe
from flyte_ddp.text import listed

BINS = 64  # of a histogram
MOST_NORMS = 10  # that a log line has, unless all gradients are logged


class TrainingState:
    """The state that a checkpoint holds and a resume restores, and the step that changes it."""

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
            recipe: its methods make optimizer and schedule.
            model: the network, on the rank's device.
            names: of the measures, "loss" first.
            progress: a new one.
            train: the batches of an epoch.
            device: of this rank.
            autocast: whether the network computes in bfloat16.
            total_steps: of the whole training, for the schedule.
            base: the weights that model() has frozen.
            moving: names of frozen weights that forward changes nevertheless.
            has_unused: see ReplicatedStep.
            gathers: whether the recipe calls all_gather().
            average: of the weights; None without one.
            log_gradients: whether events have the gradients of all parameters.
        """
        self.log_gradients, self.train, self.world_size = log_gradients, train, train.world_size
        self.recipe, self.names, self.device, self.micro_batch = recipe, tuple(names), device, recipe.micro_batch
        self.model, self.base, self.average = model, base or FrozenBase(model), average
        self._buffers, self._moving = Buffers(model), [model.get_parameter(name) for name in moving]
        self._buffers_of_average = Buffers(average.model) if average else None
        self._moving_of_average = [average.model.get_parameter(name) for name in moving] if average else []
        virtual_ranks: int = recipe.settings.virtual_ranks
        self.precision = "bfloat16" if autocast else "float32"
        step = Step(self.model, recipe, self.names, self.world_size, autocast)
        self.parallel = make_parallel(step, virtual_ranks, has_unused)
        if average and virtual_ranks and self.world_size > 1:
            # A copy from before the network had rank 0's weights
            rank_0s.take((*average.model.parameters(), *average.model.buffers()))
        optimizer = own_optimizer(recipe, model)
        given = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        # Trainable weights that are not trained all the same, by name
        self.left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
        self.layout = Layout(self.model, optimizer)
        self.optimizer = on_shards(optimizer)
        # LambdaLR asks for the rate of a step after the last, for which a schedule has none
        last = total_steps - 1
        self.schedule = LambdaLR(self.optimizer, lambda step: recipe.lr_lambda(min(step, last), total_steps))
        # A loss or gradient that is not finite sets this flag for good. An optimizer that ignores it isn't called then
        self.flag = torch.zeros((), dtype=torch.float32, device=device)
        # What an optimizer divides the gradients by in its step, if it can, which saves a pass over them
        self._divisor = torch.ones((), dtype=torch.float32, device=device)
        self._is_guarded = torch_compat.guard_steps(self.optimizer, self.flag, self._divisor)
        named = model.named_parameters()
        self._trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._base_versions: dict[str, int] = {}  # before the first step
        self.gathers_by_part = gathers and virtual_ranks > 0
        self._gathered: Gathered | None = None  # in the current step
        self.progress = progress
        progress.measure(names)
        self._trained = 2 * self.names.index(trained_measure(names))
        self._norms = torch.zeros(0, dtype=torch.float32, device=device)
        self.best_tracker: BestTracker | None = None  # None without a validation split
        self.audit: Audit | None = None
        self.best_models: BestModels | None = None  # None without keep_best
        self.drift: Drift | None = None  # None on a rank that is alone

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated and returned: the average if there is one."""
        return self.average.model if self.average else self.model

    def kept(self) -> KeptBuffers:
        """Return a copy of what forward passes change."""
        return self._buffers.kept(self._moving)

    def kept_of_evaluated(self) -> KeptBuffers:
        """Return a copy of what forward passes of the network that is evaluated may change."""
        if self._buffers_of_average:
            return self._buffers_of_average.kept(self._moving_of_average)
        return self.kept()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def train_step(self, shares: Sequence[Batch], stop: bool, save: bool = False) -> None:
        """Update the weights once from this rank's shares of a global batch; a collective.

        If the loss or a gradient is not finite, no rank changes the weights, in this step and in all later ones. The
        host waits for the device only if the optimizer cannot skip a step by itself.

        Args:
            shares: this rank's shares of the global batch.
            stop: whether this rank asks all ranks to stop.
            save: whether this rank asks for a checkpoint.
        """
        self._base_versions = self._base_versions or self._versions_of_base()
        self.parallel.zero_grad()  # here rather than at the end, so that gradients can be inspected until the next step
        before = self.kept() if isinstance(self.parallel, ExactStep) else None
        if before and self.gathers_by_part:
            self._gathered = self._gather(shares, before)
        backward = partial(self._backward, (stop, save), before)
        if self.audit:
            totals = self.audit.added_up(backward, shares, self.progress.epoch, self.progress.step)
        else:
            totals = self.parallel.added_up(partial(backward, shares))
        # From here on no rank asks another: the totals are those of all ranks together, bit for bit the same on each,
        # so flag, scale and clipping, which follow from them, are, too, and either all ranks step or none. Nor does the
        # host wait for the device: they stay there, and an optimizer that can (_is_guarded) reads the flag
        new = totals.measured
        self._buffers.broadcast(self._moving)
        seed_all(derive_key(Use.OWN_STEP, shares[0].seed, 1))  # all ranks draw alike again, as an optimizer might
        scale = new[self._trained + 1].reciprocal().nan_to_num_(posinf=0.0)  # 0 if the weights add up to 0
        self._norms = totals.norms * scale
        norm = torch.linalg.vector_norm(self._norms)
        total = norm + new[self._trained] + new[self._trained + 1]
        self.flag.logical_or_(total - total)  # 0 if finite, else NaN, which counts as true
        self.progress.sums.add(totals, self.flag)
        if self.recipe.clip_norm:
            scale = scale * (self.recipe.clip_norm / norm).clamp(max=1)
        if self._is_guarded:
            torch.reciprocal(scale, out=self._divisor)
            self.optimizer.step()
        elif not self.flag:
            torch_compat.scale(self._gradients()[1], scale)
            self.optimizer.step()
        self.schedule.step()
        if self.average:
            self.average.update(self.model, self.schedule.last_epoch - 1)
        self.progress.step += 1
        self.progress.clock.lap(StepPart.COMPUTING)

    def _backward(self, asked: tuple[bool, bool], before: KeptBuffers | None, shares: Sequence[Batch]) -> None:
        """Run the forward and backward passes of this rank's shares.

        before: where a rank may have several shares, or compute them again, what forward passes change, as it was
        before the step. Each share begins with it, and afterwards it is as the first share left it.
        """
        after: KeptBuffers | None = None
        clock = self.progress.clock
        for share in shares:
            if before:
                before.put_back()
            parts = self.cut_up(share)
            for number, part in enumerate(parts, 1):
                is_last = share is shares[-1] and number == len(parts)
                # Of a single value, batch norm's variance is no number
                of_one = self.kept() if part.share.count == 1 else None
                with any_batch_size(), nullcontext() if is_last else self.parallel.no_sync():
                    loss = self.parallel(part, asked, is_last)
                    if self.world_size > 1:
                        torch_compat.after_backward(loss, partial(clock.lap, StepPart.COMPUTING))
                    loss.backward()
                    clock.lap(StepPart.WAITING if self.world_size > 1 else StepPart.COMPUTING)
                if of_one:
                    of_one.replace_not_finite()
            after = after or (self.kept() if before else None)
            self.parallel.finish_part(share is shares[-1])
        if after:
            after.put_back()

    def cut_up(self, share: Batch) -> list[Batch]:
        """Return the parts that a share is computed in, having seeded what is drawn in all of them."""
        seed_part(share.seed, share.share.part)
        parts = self.parallel.parts(share, self.micro_batch)
        return [self._gathered.given_to(part) for part in parts] if self._gathered else parts

    @torch_compat.only_deterministic()
    def _gather(self, shares: Sequence[Batch], before: KeptBuffers) -> Gathered | None:
        """Return what all_gather() returns for each part of a step; a collective. before: see _backward."""
        step = self.parallel.module
        parts = [part for share in shares for part in self.parallel.parts(share, 0)]
        with any_batch_size():
            return gathered(self.recipe, step.outputs, step.trained, parts, before.put_back)

    def gradient_norms(self) -> dict[str, float]:
        """Euclidean norm of each parameter's gradient in the last step, before clipping; makes the host wait."""
        return dict(zip(self._gradients()[0], self._norms.tolist(), strict=True))

    def gradient_histograms(self) -> dict[str, tuple[list[float], list[float]]]:
        """Return each gradient of the last step, after clipping, as counts of equal bins, and the bins' edges."""
        names, gradients = self._gradients()
        # in float64: float32 may have no edges of bins between two values that are next to one another
        histograms = (np.histogram(gradient.cpu().double().numpy(), BINS) for gradient in gradients)
        return {
            name: (counts.tolist(), edges.tolist()) for name, (counts, edges) in zip(names, histograms, strict=True)
        }

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        named = [(name, local(p.grad)) for name, p in self._trainable if p.grad is not None]
        return [name for name, _ in named], [gradient for _, gradient in named]

    def measures(self, pairs: Sequence[float]) -> dict[str, float]:
        """Return the measures that are logged for these values and weights, which alternate."""
        return ratios(self.recipe, self.names, pairs)

    def samples(self, sums: Sums) -> int:
        """Return how many samples the epoch's steps up to these sums have had."""
        return self.train.samples_until(sums.steps)

    def figures(self) -> StepFigures:
        """Return the last step's learning rate and norms of gradients; the host waits for the device."""
        norms = self.gradient_norms()
        largest = dict(heapq.nlargest(MOST_NORMS, norms.items(), itemgetter(1)))
        return StepFigures(self.learning_rate, math.hypot(*norms.values()), norms if self.log_gradients else largest)

    def step_error(self, step: int) -> NonFiniteError:
        """Repeat a step, from 0, and return an error that names what was not finite, and on which ranks; a collective.

        The step itself cannot tell: its gradients are those of all ranks together.
        """
        epoch = self.progress.epoch
        bad = [False, False]
        for part in (part for share in next(self.train.steps(epoch, step)) for part in self.cut_up(share)):
            with any_batch_size():
                loss = self.parallel.module(part, (False, False), False)
                gradients = self.parallel.own_gradients(loss)
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
            bad_in_part = [not all(bool(one.isfinite()) for one in ones) for ones in ([loss], norms)]
            bad = [was or now for was, now in zip(bad, bad_in_part, strict=True)]
        of_ranks: list[Any] = [None] * self.world_size
        distributed.all_gather_object(of_ranks, bad)
        for what, flags in zip(("loss", "gradient"), zip(*of_ranks, strict=True), strict=True):
            ranks = [rank for rank, flag in enumerate(flags) if flag]
            if ranks:
                return NonFiniteError.in_step(what, ranks, epoch, step)
        return NonFiniteError.in_step("gradient", [*range(self.world_size)], epoch, step)  # in sum, or sharded

    def must_wait(self) -> bool:
        """Return False: a step of a recipe leaves no gradient that a checkpoint would need."""
        return False

    def choose(self, finished: EpochFinished) -> None:
        """Keep the weights if this evaluation, the last of the history, is among the best so far; a collective."""
        if self.best_tracker:
            weights = {name: local(weight) for name, weight in self.base.without(self.evaluated).items()}
            self.best_tracker.after_evaluation(len(self.progress.history) - 1, finished.validation, weights)
        if self.best_models:
            self.best_models.after_evaluation()

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs; tensors are those of the training itself, which the next step changes.

        Of a sharded network they are this rank's, as Shards, which have room in a file, see `fill`.
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
            "choice": self.best_tracker.state_dict() if self.best_tracker else None,
        }
        return self.layout.marked(content)

    def evaluated_weights(self) -> dict[str, Tensor | Shard]:
        """Return the weights of the network that is evaluated, without the base."""
        weights: dict[str, Tensor | Shard] = self.layout.marked({"model": self.base.without(self.evaluated)})["model"]
        return weights

    def best_weights(self) -> dict[str, Tensor | Shard]:
        """Return the weights of the best evaluation so far, without the base."""
        assert self.best_tracker
        marked = self.layout.marked({"choice": {"weights": self.best_tracker.weights}})
        weights: dict[str, Tensor | Shard] = marked["choice"]["weights"]
        return weights

    def compare_between_ranks(self) -> None:
        """Compare the ranks' weights, or with audits all that a checkpoint has, after a step; a collective.

        Ranks of a sharded network have other rows, and are not compared.

        Raises:
            InputError: A frozen weight has changed, though it did not in the trial, and no checkpoint has it.
        """
        now = self._versions_of_base()
        if self._base_versions not in ({}, now) and self.base.has_changed():
            raise InputError(
                f"frozen weights ({listed(sorted(self.base.names))}) must change from the first step on or never, as "
                "no checkpoint has them otherwise, and some have begun to change: make them buffers, by register_buffer"
            )
        self._base_versions = now
        if not self.drift or is_sharded(self.model):
            return
        content, is_audited = self.state_dict(), bool(self.audit and self.audit.every)
        compared = [content[part] for part in (("model", "average", "optimizer") if is_audited else ("model",))]
        tensors = [leaf for leaf in torch_compat.pytree.tree_leaves(compared) if isinstance(leaf, Tensor)]
        what = "weights, or the optimizer," if is_audited else "weights"
        self.drift.compare(tensors, what, self.progress.epoch, self.progress.step - 1)

    def _versions_of_base(self) -> dict[str, int]:
        """Return how often each weight that no checkpoint has was changed in place, by name."""
        named = self.model.state_dict(keep_vars=True) if self.base.names else {}
        return {name: version(weight) for name, weight in named.items() if name in self.base.names}

    def digest(self) -> str:
        """Return the digest of the weights that are evaluated; a collective."""
        return weights_digest(self.evaluated_weights(), self.base.digest, self.device)

    def load_weights(self, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Load weights, without the base, into the network or its average; a sharded network takes this rank's rows."""
        self.base.load(network, fitted(weights, network))
        self._base_versions = {}  # the base was copied onto itself

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what state_dict has returned, on any number of ranks.

        The optimizer and best_tracker keep the tensors of saved; of what is sharded, saved has this rank's rows.
        """
        self.load_weights(self.model, saved["model"])
        if self.average:
            self.load_weights(self.average.model, saved["average"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.progress.load_state_dict(saved["progress"])
        if isinstance(self.parallel, ExactStep):
            self.parallel.grid = saved["grid"]
        if self.recipe.micro_batch < 0:
            self.micro_batch = saved["micro_batch"]
        if self.best_tracker:
            self.best_tracker.load_state_dict(saved["choice"])
