"""The trace of a training: digests of what steps compute, by which `compare` finds where two trainings part."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_forward_hook

from flyte_ddp.engine.digest import sum_of_all
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.launch.environment import Environment

FILE = "trace.jsonl"
BATCH, LOSS, NETWORK = "the batch", "the loss", "the network"  # what is no layer
Named = list[tuple[str, Tensor]]  # names and () int64 digests, in the order in which they were computed


class Trace:
    """Writes digests of each N-th step to trace.jsonl: of its batch, outputs, losses, gradients and first weights.

    Equal digests mean equal bits. Between the traced steps it costs nothing. A step is begun by begin(). In it each
    part of the batch is computed between begin_part() and end_part(), and end() writes one line.
    """

    def __init__(self, every: int, logs: str, rank: int, device: torch.device, is_resumed: bool):
        """Prepare the trace.

        Args:
            every: trace the first step, and each step whose number is a multiple of this.
            logs: the folder of the file, which rank 0 alone needs. What an earlier training has left in it is replaced
                unless is_resumed.
            rank: this rank. Rank 0 writes the file.
            device: the device of this rank.
            is_resumed: whether the training goes on from a checkpoint.
        """
        self._every = every
        self._rank = rank
        self._device = device
        self._file = Path(logs, FILE)
        self._is_on = False
        self._line: dict[str, Any] = {}
        self._networks: Mapping[str, nn.Module] = {}
        self._names: dict[nn.Module, str] = {}
        self._parts: dict[tuple[int, int], Named] = {}  # by call of backward in the step, and part
        self._part: Named | None = None  # the one whose forward pass runs now
        self._remove_hook: Callable[[], None] = lambda: None
        self._weights: Named = []
        self._gradients: dict[str, Tensor] = {}
        if rank == 0 and not is_resumed:
            self._file.unlink(missing_ok=True)

    def begin(self, networks: Mapping[str, nn.Module], epoch: int, step: int, steps_per_epoch: int) -> None:
        """Begin a step. If the step is traced, rank 0 digests the weights and buffers.

        A step is traced if its number in the whole training is a multiple of `every`, an argument of Trace. In other
        steps, nothing is recorded.

        Args:
            networks: the networks, by the prefix that their layers and weights have in the trace.
            epoch: the number of the epoch, from 0.
            step: the number of the step in the epoch, from 0.
            steps_per_epoch: the number of steps of an epoch.
        """
        number = epoch * steps_per_epoch + step
        self._is_on = number % self._every == 0
        if not self._is_on:
            return
        self._line = {"epoch": epoch, "step": step, "number": number}
        self._networks = networks
        self._names = {
            module: ".".join(filter(None, (prefix, name))) or NETWORK
            for prefix, network in networks.items()
            for name, module in network.named_modules()
        }
        self._parts.clear()
        self._gradients.clear()
        if self._rank == 0:
            named = chain.from_iterable((*_parameters(networks), *_buffers(networks)))
            self._weights = [(name, self._digest(tensor)) for name, tensor in named]

    def begin_backward(self, call: int = 0) -> None:
        """Forget what was computed in this call of backward: it is computed again, or an audit computed it."""
        for key in [key for key in self._parts if key[0] == call]:
            del self._parts[key]

    def begin_part(self, part: int, batch: Any, call: int = 0) -> None:
        """Record the digest of a part of the batch, and from now on that of each module's output, until end_part().

        In a step that is not traced nothing happens. If the previous part has not ended, it ends now. If the same part
        and call are begun again, as for the next micro-batch, the new digests are appended.

        Args:
            part: the number of the part: the virtual rank, or without virtual ranks this rank.
            batch: the tensors of the part, in any containers.
            call: the number of the call of backward in this step, from 0.
        """
        if not self._is_on:
            return
        self.end_part()
        self._part = self._parts.setdefault((call, part), [])
        self._part.append((BATCH, self._digest(batch)))
        # Torch takes other kernels for modules that have hooks of their own, and none for hooks of all modules
        self._remove_hook = register_module_forward_hook(self._called).remove

    def end_part(self, loss: Tensor | None = None) -> None:
        """Digest the loss of a part, if it is given, and no more outputs: layers recomputed by backward count once."""
        if self._part is not None:
            self._remove_hook()
            if loss is not None:
                self._part.append((LOSS, self._digest(loss)))
            self._part = None

    def _called(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._names.get(module)
        is_compiling = torch.compiler.is_compiling()  # the user's code does, and a digest can't be part of that
        if name and self._part is not None and not is_compiling:
            self._part.append((name, self._digest(output)))

    def record_gradients(self, weights: Iterable[Tensor] | None = None) -> None:
        """Record on rank 0 the digest of each weight's gradient, once the ranks have added up their gradients.

        In a step that is not traced, and on other ranks, nothing happens. A second call in a step, as for a second
        optimizer step, combines a gradient's new digest with its earlier one.

        Args:
            weights: the weights whose gradients are digested; None for all weights of the networks. Weights without a
                gradient are left out.
        """
        if not self._is_on or self._rank:
            return
        counted = None if weights is None else {id(weight) for weight in weights}
        for name, weight in chain.from_iterable(_parameters(self._networks)):
            if weight.grad is not None and (counted is None or id(weight) in counted):
                self._gradients[name] = self._digest(weight.grad) + 3 * self._gradients.get(name, 0)

    def end(self) -> None:
        """End a step, and if it is traced, write all ranks' digests to the trace file; a collective in traced steps.

        Rank 0 appends one line of JSON. In a step that is not traced nothing is written. If the file cannot be written,
        rank 0 prints that to standard error, and training goes on.
        """
        self.end_part()
        if not self._is_on:
            return
        self._is_on = False
        own = [{"call": call, "part": part, "outputs": _in_hex(named)} for (call, part), named in self._parts.items()]
        of_ranks: list[Any] | None = [None] * distributed.get_world_size() if self._rank == 0 else None
        distributed.gather_object(own, of_ranks)
        if of_ranks is None:
            return
        parts = sorted(chain.from_iterable(of_ranks), key=lambda one: (one["call"], one["part"]))
        gradients = _in_hex([*self._gradients.items()])
        line = {**self._line, "weights": _in_hex(self._weights), "parts": parts, "gradients": gradients}
        try:
            with self._file.open("a") as file:
                file.write(f"\n{json.dumps(line)}\n")  # what a full disk or a kill has cut off stays a line of its own
        except OSError as error:  # a disk that is full must not end the training
            print(f"{self._file} lacks step {self._line['number'] + 1}: {error}", file=sys.stderr, flush=True)

    @torch.no_grad()
    def _digest(self, value: Any) -> Tensor:
        """Return a digest of all tensors in a value, () int64; of sparse ones nothing is known."""
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return sum_of_all(
            (leaf.detach().resolve_conj().resolve_neg() for leaf in leaves if leaf.layout is torch.strided),
            self._device,
        )


def make_trace(environment: Environment, device: torch.device, job: Job, is_resumed: bool) -> Trace | None:
    """Return the trace that a training's options ask for, on all ranks alike; None if they ask for none."""
    every = job.options.trace_every
    return Trace(every, job.logs, environment.rank, device, is_resumed) if every else None


def _parameters(networks: Mapping[str, nn.Module]) -> list[Iterable[tuple[str, nn.Parameter]]]:
    return [network.named_parameters(prefix) for prefix, network in networks.items()]


def _buffers(networks: Mapping[str, nn.Module]) -> list[Iterable[tuple[str, Tensor]]]:
    return [network.named_buffers(prefix) for prefix, network in networks.items()]


def _in_hex(named: Named) -> list[tuple[str, str]]:
    """Return each name with 16 hex digits; the host waits for the device once."""
    numbers = torch.stack([number for _, number in named]).tolist() if named else []
    return [(name, f"{number % 2**64:016x}") for (name, _), number in zip(named, numbers, strict=True)]
