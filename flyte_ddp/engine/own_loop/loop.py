"""The object that a training loop of the user's own is given.

def train(loop: Loop) -> None:
    model = loop.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    batches, test = loop.batches(TrainSet()), loop.evaluation(TestSet())
    loop.keep(model=model, optimizer=optimizer)
    for epoch in loop.epochs():
        for inputs, labels in batches:
            ...
            loop.log(loss=loss)
        loop.evaluated(loss=...)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.block_split import BlockSplit
from flyte_ddp.engine.buffers import Buffers
from flyte_ddp.engine.checkpoints.checkpoint import check_readable
from flyte_ddp.engine.checkpoints.resume import state_on_all_ranks
from flyte_ddp.engine.checks.data_probe import find_unequal_data
from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.compiler_compat import uncompiled
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import find_data_path, make_split
from flyte_ddp.engine.own_loop.agreement import Call, names_on_all_ranks
from flyte_ddp.engine.own_loop.batches import Evaluation, TrainSteps
from flyte_ddp.engine.own_loop.parts import ByParts, Parts
from flyte_ddp.engine.own_loop.state import HIGHEST, LOWEST, LoopState
from flyte_ddp.engine.seeds import seed_all, seed_part
from flyte_ddp.engine.torch_compat import SettledBuckets, naming_unused, pytree
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.random_numbers import Use, derive_key

Number = Tensor | float
NUMBERS = (int, float, np.number, np.bool_)


class Loop:
    """The ranks, as a loop of your own sees them. All ranks call its methods alike, since most ask the other ranks.

    Attributes:
        settings: those that the training was given.
        data_path, init_path: the file or folder that it was given as data, and as init; None without one.
        rank, world_size: this process among all of them.
        device: of this rank, on which its batches are.
    """

    def __init__(self, environment: Environment, state: LoopState, link: Link, job: Job, cache: BlockCache):
        self.settings, self.data_path, self.init_path = job.settings, find_data_path(job.data), job.init
        self.rank, self.world_size, self.device = environment.rank, environment.world.size, state.device
        self._environment, self._link, self._job, self._cache = environment, link, job, cache
        self._state, self._splits = state, 0

    @property
    def epoch(self) -> int:
        """Return the number of the epoch, from 0."""
        return self._state.progress.epoch

    @property
    def step(self) -> int:
        """Return the number of the epoch's steps that are done."""
        return self._state.progress.step

    # --- before the first epoch ---

    def wrap(self, model: nn.Module, find_unused_parameters: bool = False) -> DistributedDataParallel | ByParts:
        """Move a network to the rank's device, and wrap it so that the ranks train it together; a collective.

        All ranks get rank 0's weights and buffers. Without settings.virtual_ranks the network is wrapped in torch's
        DistributedDataParallel. With virtual ranks, its gradients can only come from loop.backward, and only one
        network can be wrapped.

        Args:
            model: the network, which is moved in place.
            find_unused_parameters: whether a step may leave trained weights without a gradient on some ranks or all, as
                in DistributedDataParallel. With virtual ranks it always may.

        Returns:
            The wrapped network.

        Raises:
            InputError: The network is already wrapped, or has no weight that is trained. A weight of a lazy layer has
                no shape yet. Or, with virtual ranks, this is the second network, a trained weight is not float32, or a
                layer is nn.SyncBatchNorm.
        """
        state, parts = self._state, self.settings.virtual_ranks
        if isinstance(uncompiled(model), (DistributedDataParallel, nn.DataParallel)):
            kind = type(uncompiled(model)).__name__
            raise InputError(f"loop.wrap must be given the network itself, got {kind}: leave out {kind}(...)")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError("loop.wrap: the network must have a weight that is trained; others need no wrapping")
        lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
        if lazy:
            raise InputError(
                f"loop.wrap: {lazy[0]} has no shape yet: call the network once before, on a batch of zeros"
            )
        if parts and state.exact:
            raise InputError("loop.wrap must be called once with virtual_ranks: put both networks into one module")
        synced = [name for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
        if parts and synced:
            name = synced[0] or "the network"
            raise InputError(
                f"loop.wrap: {name} must not be nn.SyncBatchNorm with virtual_ranks, since a part of a batch is "
                "computed without the others: leave convert_sync_batchnorm out, or set virtual_ranks to 0"
            )
        wrapped: ByParts | _Replicated
        if parts:
            wrapped = ByParts(model.to(self.device), parts, lambda: state.is_stepping)
            state.exact = wrapped.exact
        else:
            wrapped = _Replicated(
                model.to(self.device),
                lambda: (state.progress.epoch, state.progress.step) if state.is_stepping else None,
                lambda: state.agree(Call.BACKWARD),
                find_unused_parameters=find_unused_parameters,
            )
        state.wrapped.append(wrapped.module)
        state.buffers.append(Buffers(wrapped.module))
        return wrapped

    def batches(self, data: Any) -> TrainSteps:
        """Return an iterable of this rank's part of each global batch, shuffled in each epoch; a collective.

        Iterate over it once in each epoch of loop.epochs. Each batch is a training step. A resumed epoch begins with
        its next step. A global batch has settings.batch_size samples. An epoch leaves out the last samples if they do
        not fill a batch, because DistributedDataParallel needs as many samples on each rank.

        Args:
            data: the training data: arrays, a Dataset or Blocks, like what Recipe.data returns.

        Returns:
            An iterable whose length is the number of steps. A batch is this rank's samples on its device. With virtual
            ranks a batch can only be given to loop.backward.

        Raises:
            InputError: The data are invalid or differ between ranks. Or batch_size is larger than the data, or not a
                multiple of the number of ranks or, with virtual ranks, of virtual_ranks.
        """
        return TrainSteps(self._split(data, "train"), self.settings, self._environment, self._state)

    def evaluation(self, data: Any) -> Evaluation:
        """Return an iterable of this rank's part of each batch of the data; a collective, as is iterating over it.

        A batch has settings.test_batch_size samples over all ranks. Each sample comes once, on one rank. So a rank may
        get fewer parts than others, or none. With virtual ranks, each part of a batch comes by itself.

        Args:
            data: the data to evaluate on: arrays, a Dataset or Blocks, like what Recipe.data returns.

        Returns:
            An iterable of samples on the rank's device. It can be iterated over any number of times.

        Raises:
            InputError: The data are invalid or differ between ranks.
        """
        split = self._split(data, "test")
        return Evaluation(split, self.settings, self._environment, self._link, self._state)

    def autocast(self) -> torch.autocast:
        """Return the context in which settings.precision is computed; auto is float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")

    def keep(self, model: nn.Module, **parts: Any) -> None:
        """Name everything that changes while you train, and restore it from a checkpoint; a collective.

        Checkpoints store the state of what is named here. Call the method once, after loop.wrap and before loop.epochs.
        Without an earlier checkpoint nothing is changed.

        Args:
            model: what loop.wrap returned, maybe compiled. Its weights are what the training returns.
            **parts: everything else with state_dict and load_state_dict, by names of your choice: optimizers,
                schedules, averages, scalers.

        Raises:
            InputError: loop.keep is called twice. The model is not wrapped. A part lacks one of the two methods, or its
                state has objects that could not be loaded from a checkpoint again. Or the checkpoint does not fit the
                parts.
        """
        state = self._state
        if state.parts:
            raise InputError("loop.keep must be called once, with all that changes")
        for name, part in {"model": model, **parts}.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                kind = type(part).__name__
                raise InputError(f"loop.keep: {name} must have state_dict and load_state_dict, got {kind}")
            own = uncompiled(part)
            if name == "model" and not isinstance(own, (DistributedDataParallel, ByParts)):
                kind = type(own).__name__
                raise InputError(
                    f"loop.keep: model must be what loop.wrap has returned, as ranks train together, got {kind}"
                )
            is_wrapped = isinstance(own, (DistributedDataParallel, ByParts))
            state.parts[name] = uncompiled(own.module) if is_wrapped else own
        check_readable(state.state_dict())
        state.parts.first_shapes = state.parts.shapes()
        saved = state_on_all_ranks(self._job, self._link.emit, self.device)
        if saved is not None:
            state.load_state_dict(saved)

    # --- while it trains ---

    def epochs(
        self, headline: str = "loss", percent: Sequence[str] = (), best: Literal["", "highest", "lowest"] = ""
    ) -> Iterator[int]:
        """Yield the number, from 0, of each epoch that is still to be trained; a collective.

        Call it once, after loop.batches and loop.keep. The first epoch is 0, or the one in which a restored checkpoint
        goes on. After each epoch, the loop records what loop.evaluated was given, and writes a checkpoint. If a stop
        was requested, the training ends there.

        Without `best`, an epoch's evaluation counts as the test split's, and the training returns the last epoch's
        weights.

        With `best`, an epoch's evaluation counts as a validation split's, and the training returns the weights of the
        epoch with the best headline. settings.patience, which may end the epochs early, and options.keep_best go by the
        headline. An evaluation after the last epoch counts as the test split's.

        Args:
            headline: the name of the measure that the training is judged by.
            percent: the names of measures from 0 to 1 that are shown in per cent.
            best: which headline is the best, "highest" or "lowest"; "" to return the last epoch's weights.

        Raises:
            InputError: `best` is another word, or is missing although a setting or option needs it. loop.batches or
                loop.keep has not been called. loop.epochs is called twice. An epoch has no evaluation with the
                headline. Or ranks do different things.
            RecoverableError: A host differs from the others, and options.odd_hosts is "refuse".
            NonFiniteError: A measure of a step, or a weight, is not finite.
            StopRequested: A rank was asked to stop; a checkpoint was written.
        """
        if best not in ("", HIGHEST, LOWEST):
            raise InputError(f'loop.epochs: best must be "highest" or "lowest", or be left out, got {best!r}')
        values = {
            f"{type(self.settings).__name__}.patience": self.settings.patience,
            f"{type(self.settings).__name__}.minimum_delta": self.settings.minimum_delta,
            "RunOptions.keep_best": self._job.options.keep_best,
        }
        for name, value in values.items():
            if value and not best:
                raise InputError(
                    f"{name} must be 0 unless loop.epochs is told which headline is the best, got {value}: call "
                    f'loop.epochs(headline={headline!r}, best="highest"), or "lowest", or leave it out'
                )
        state = self._state
        precision = "bfloat16" if self.settings.precision == "bfloat16" else "float32"
        state.start(headline, tuple(percent), precision, best)
        while not state.is_trained:
            seed_all(derive_key(Use.OWN_STEP, self.settings.seed, self.epoch, 0))  # as if nothing had been interrupted
            yield self.epoch
            state.end_epoch()
        state.load_best_epoch()

    def backward(self, batch: Any, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Compute the gradients of loss_of(batch), and return that loss; a collective, in place of loss.backward().

        The gradients are added to those that the weights already have.

        Without virtual ranks, loss_of is called once, and DistributedDataParallel averages the gradients of all ranks.

        With settings.virtual_ranks, loss_of is called for each of this rank's parts of the batch, maybe several times.
        Loss and gradients are the means over all parts of all ranks, with the same bits on any number of ranks.

        Before each call of loss_of, the global random generators are seeded for this rank or part. Afterwards they are
        seeded alike on all ranks.

        Args:
            batch: a batch of loop.batches.
            loss_of: is called with the samples of the batch, or with virtual ranks of a part, and returns their mean
                loss, a tensor without dimensions.

        Returns:
            The loss, (), detached: of this rank's samples, or with virtual ranks of the global batch.

        Raises:
            InputError: Ranks do different things. Or, with virtual ranks, loop.wrap has not been called, loss_of
                returns no loss or changes a weight, or other weights require a gradient than at loop.wrap. Or, in an
                audited step, gradients of the same samples have other bits each time that a rank computes them.
            WrongBitsError: In an audited step, ranks compute other bits from the same samples.
        """
        state = self._state
        state.backward_calls += 1
        if isinstance(batch, Parts):
            if not state.exact:
                raise InputError("call loop.wrap before loop.backward: it says what network is trained")
            state.agree(Call.BACKWARD)
            loss = state.exact.backward(batch, loss_of, state.step_seed, state.backward_calls)
        else:
            seed_part(state.step_seed, self.rank, state.backward_calls)
            loss = loss_of(batch)
            loss.backward()
            loss = loss.detach()
        seed_all(derive_key(Use.OWN_STEP, state.step_seed, state.backward_calls))  # all ranks draw alike again
        return loss

    def log(self, **measures: Number) -> None:
        """Log this step's "loss" and other measures; call it once in each step, on every rank.

        A log line has each measure's mean over the ranks, which count equally, and over the steps since the line
        before. A measure named "tokens" is the number of tokens in this rank's batch: tokens per second follow from it.

        The ranks exchange the values at the end of the step. If a value is not finite, the end of this or a later step
        raises NonFiniteError, before a checkpoint is written. A second call in a step replaces the first. The host
        waits for a GPU only if a tensor on the CPU is logged.

        Args:
            **measures: the values by name, of this rank's samples. The mean of a tensor is taken. "loss" must be among
                them.

        Raises:
            InputError: "loss" is missing, the names are not those of the earlier steps, or a value is no number,
                tensor or array. If ranks log different names in their first step, the end of that step raises it.
        """
        names, has = self._state.progress.names, ", ".join(measures)
        if "loss" not in measures:
            raise InputError(f"loop.log must have a measure named loss, got {has or 'none'}: give it the step's loss")
        if names and {*names} != {*measures}:
            raise InputError(f"loop.log must have the same measures in each step: {', '.join(names)}, got {has}")
        self._state.logged = {name: _mean(name, value, self.device) for name, value in measures.items()}

    def measured(self, **measures: Tensor | tuple[Number, Number]) -> None:
        """Add the measures of a batch of loop.evaluation to sums that loop.evaluated adds up over all ranks.

        Call it for each batch while you iterate over loop.evaluation. Ranks exchange nothing here. With virtual ranks
        the sums are kept for each part of a batch, so that the result has the same bits on any number of ranks.

        Args:
            **measures: by name, a tensor of the samples' values, each with the weight 1, or a pair of values and their
                weights, such as (correct, samples). Tensors are summed.

        Raises:
            InputError: No loop over loop.evaluation is running. A measure is no tensor or pair. Or it is a single
                number, which might be a mean: it would count as one sample, although it is the mean of many.
        """
        state, parts = self._state, self.settings.virtual_ranks or 1
        if state.part is None:
            raise InputError("loop.measured must be called for each batch, while you iterate over loop.evaluation")
        for name, value in measures.items():
            if isinstance(value, NUMBERS) or (isinstance(value, Tensor) and value.ndim == 0):
                raise InputError(
                    f"loop.measured: {name} must have a value for each sample, or be a pair of a sum and its number of "
                    "samples, got a single number: use reduction='none'"
                )
        for name, pair in _pairs("loop.measured", measures).items():
            sums = state.measured.setdefault(name, torch.zeros(parts, 2, dtype=torch.float64))
            sums[state.part] += torch.tensor(pair, dtype=torch.float64)

    def evaluated(self, **measures: Number | tuple[Number, Number]) -> dict[str, float]:
        """Record this epoch's evaluation over all ranks' samples, and return its measures; a collective.

        Call this on every rank, once in each epoch, after iterating over loop.evaluation. The measures are those of
        loop.measured since the last call of loop.evaluated, and those that this call is given. A call after the last
        epoch records the measures of the test split.

        A measure is the sum of all ranks' values, divided by the sum of all ranks' weights. If all ranks give this call
        the same value and weight, the measure is exactly that value divided by that weight, on any number of ranks.

        Args:
            **measures: further measures by name. Each is a number or tensor, whose values have the weight 1, or a pair
                of values and their weights, such as (correct, samples).

        Returns:
            Each measure by name, the same on all ranks.

        Raises:
            InputError: There are no measures, or ranks have different ones. A measure is no number, tensor or pair. A
                measure is in loop.measured, too, or its weights add up to 0. Ranks do different things. With
                loop.epochs(best=...), loop.evaluated is called twice at the same step. With virtual ranks, the
                evaluation was left before its end.
            NonFiniteError: The measure "loss" is not finite.
        """
        state, parts = self._state, self.settings.virtual_ranks or 1
        if state.best_tracker and state.evaluated_at == state.steps_done and not state.is_over:
            raise InputError(
                "loop.evaluated must be called once in each epoch with loop.epochs(best=...), on the validation split: "
                "let settings.patience end the training, and evaluate a test split once loop.epochs has come to its end"
            )
        state.agree(Call.EVALUATED)
        if self.settings.virtual_ranks and state.measured and state.is_cut:
            raise InputError(
                "with virtual_ranks an evaluation must go over all of its batches, and was left before its end, where "
                "each rank has seen other parts: take fewer samples as data instead, such as a torch.utils.data.Subset"
            )
        own, state.measured, state.evaluated = state.measured, {}, {}
        given = _pairs("loop.evaluated", measures)
        for name, pair in given.items():
            if name in own:
                raise InputError(f"loop.evaluated: {name} was given to loop.measured, too: give it to one of them")
            own[name] = torch.zeros(parts, 2, dtype=torch.float64)
            own[name][0] = torch.tensor(pair, dtype=torch.float64)
        of_ranks = gather_values({name: given.get(name) for name in own})
        is_given = any(any(pairs.values()) for pairs in of_ranks)  # to this call, and not to loop.measured
        names = names_on_all_ranks("loop.evaluated", of_ranks, may_lack=not is_given)
        if not names:
            raise InputError(
                "loop.evaluated must have measures that no call before has taken: give them, or call loop.measured for "
                "each batch"
            )
        none = torch.zeros(parts, 2, dtype=torch.float64)
        sums = torch.stack([own.get(name, none) for name in names]).to(self.device)
        distributed.all_reduce(sums)
        for name, (value, weight) in zip(names, sums.sum(1).tolist(), strict=True):
            if not weight:
                raise InputError(f"loop.evaluated: {name} must have samples, or weights that are not 0, on some rank")
            # The sum of three times 0.1 is rounded: such a measure would depend on the number of ranks
            if name in given and all(pairs.get(name) == given[name] for pairs in of_ranks):
                value, weight = given[name]
            state.evaluated[name] = value / weight
        if not math.isfinite(state.evaluated.get("loss", 0.0)):
            split = "validation" if state.best_tracker and not state.is_over else "test"
            raise NonFiniteError.in_evaluation(state.evaluated["loss"], split, self.epoch + (not state.is_over))
        found, state.evaluated_at = state.evaluated, state.steps_done
        if state.is_over:
            state.tested, state.evaluated = found, {}
        return dict(found)

    def _split(self, data: Any, name: str) -> Any:
        self._splits += 1  # a name of its own in the cache, or one split would be given another's blocks
        split = make_split(data, f"{name}-{self._splits}", self.device, self._job.options, self._cache)
        for reason in find_unequal_data(self._job.recipe, {name: split}):
            raise InputError(reason)
        if isinstance(split, BlockSplit):
            split.forget()  # what was looked at; a loop may ask for any number of splits
        return split


class _Replicated(SettledBuckets):
    """DistributedDataParallel; where nothing is trained, the network by itself: ranks need not evaluate alike.

    Gradients from outside of a step stay this rank's own, but no optimizer steps by them: see before_optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        position: Callable[[], tuple[int, int] | None],
        begin_backward: Callable[[], None],
        find_unused_parameters: bool,
    ):
        """Replicate a network.

        Args:
            model: it is on the rank's device.
            position: returns the epoch and step that the user's code is in; None where it is in no step.
            begin_backward: called before the gradients of a forward pass are computed, if ranks exchange them.
            find_unused_parameters: as in DistributedDataParallel.
        """
        super().__init__(model, find_unused_parameters=find_unused_parameters)
        self.broadcast_buffers = False  # LoopState.end_step does it: here, a rank that calls forward alone would hang
        self._position, self._called_in, self._begin_backward = position, (-1, -1), begin_backward
        # DistributedDataParallel never averages their gradients, also if they are trained later
        is_alone = distributed.get_world_size() == 1
        self._frozen = [] if is_alone else [one for one in model.named_parameters() if not one[1].requires_grad]
        first = next(weight for weight in model.parameters() if weight.requires_grad)
        first.register_post_accumulate_grad_hook(self._arrived)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        position = self._position()
        if position is None or not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        self._called_in = position
        for name, weight in self._frozen:
            if weight.requires_grad:
                raise InputError(
                    f"loop.wrap was given {name} with requires_grad False, and it is trained now, by each rank for "
                    "itself: let loop.wrap have it trained, in a group of the optimizer whose lr is 0 until then"
                )
        with naming_unused(self):
            outputs = super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        if self.require_backward_grad_sync:
            begin = cache(self._begin_backward)  # of several outputs, the first that has a gradient calls it
            for output in pytree.tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(lambda _: begin())
        return outputs

    def _arrived(self, _: Tensor) -> None:
        """Refuse a gradient that has come without a call of this module in its step."""
        if self._position() not in (None, self._called_in):
            raise InputError(
                "call what loop.wrap has returned, not the network in it, in each step: its gradients are this rank's "
                "own, and ranks would train networks of their own"
            )


def _pairs(call: str, measures: Mapping[str, Number | tuple[Number, Number]]) -> dict[str, tuple[float, float]]:
    """Return the sum of each measure's values, and that of their weights.

    Raises InputError, which names the call, if a measure is no number, tensor or pair.
    """
    for name, one in measures.items():
        values = one if isinstance(one, tuple) and len(one) == 2 else (one,)
        if not all(isinstance(value, (Tensor, *NUMBERS)) for value in values):
            raise InputError(
                f"{call}: {name} must be a number, a tensor or a tuple of two, such as (correct, samples), got "
                f"{one!r:.60}: give torch.tensor(values), or write the two in round brackets"
            )
    pairs = {name: one if isinstance(one, tuple) else (one, _count(one)) for name, one in measures.items()}
    return {name: (_sum(value), _sum(weight)) for name, (value, weight) in pairs.items()}


def _mean(name: str, value: Number, device: torch.device) -> Tensor:
    """Return the mean of a number or tensor, () float64 on the device; raise InputError if it is neither."""
    if isinstance(value, (int, float)):  # a copy of it to the device would make the host wait
        return torch.full((), value, dtype=torch.float64, device=device)
    try:
        return torch.as_tensor(value, dtype=torch.float64, device=device).detach().mean()
    except (TypeError, ValueError):
        raise InputError(
            f"loop.log: {name} must be a number or a tensor, got {value!r:.60}: give the step's value, or leave out "
            "what has none"
        ) from None


def _sum(value: Number) -> float:
    if isinstance(value, (int, float)):  # a tensor of it would be float32
        return float(value)
    return float(torch.as_tensor(value).detach().sum(dtype=torch.float64))


def _count(value: Number) -> float:
    return float(value.numel()) if isinstance(value, Tensor) else 1.0
