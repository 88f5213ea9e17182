"""Batch norm by groups of consecutive samples of the global batch: ghost batch norm (Hoffer et al., 2017,
arXiv 1705.08741).

The ranks' shares are cut between groups, so none needs another's statistics, forward or backward. What the running
statistics move towards is that of all ranks: it travels with the sums of each step.
"""

import functools
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.batch_norm import PLAIN, batch_norm
from flyte_ddp.engine.torch_compat import copy
from flyte_ddp.errors import InputError


class RunningStatistics:
    """A network's running means and variances. They move once per step, however often their layers are called.

    A mean moves towards that of all values, a variance towards the pooled one of the groups: the sum of the squared
    distances from the means of their groups, divided by the number of values less that of the groups.

    Attributes:
        size: of the vector of sums.
    """

    def __init__(self, model: nn.Module):
        # Which of them are statistics is seen when they are used; torch demands that those are vectors
        self._buffers = [b for b in model.buffers() if b.ndim == 1 and b.is_floating_point()]
        self._numbers = {id(buffer): number for number, buffer in enumerate(self._buffers)}
        self._lengths = [len(buffer) for buffer in self._buffers]
        self._zeros = [torch.zeros_like(buffer) for buffer in self._buffers]
        owners = [number for number, length in enumerate(self._lengths) for _ in range(length)]
        device = self._buffers[0].device if self._buffers else None
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self.size = len(owners) + 2 * len(self._buffers)
        self.start()

    def start(self) -> None:
        """Forgets what was added."""
        self._sums = list(self._zeros)
        self._weights, self._rates = [0.0] * len(self._buffers), [0.0] * len(self._buffers)

    def add(self, buffer: Tensor, sums: Tensor, weight: float, momentum: float) -> None:
        """The buffer is to move, at this rate, towards sums / weight, of all that is added on all ranks."""
        number = self._numbers.get(id(buffer))
        if number is None:
            raise InputError("ghost_batch_size needs running statistics that are buffers of the network: register them")
        self._sums[number] = self._sums[number] + sums
        self._weights[number] += weight
        self._rates[number] += weight * momentum

    def write(self, out: Tensor) -> None:
        """Writes (size,) what was added: the sums of each buffer, then their weights, then these times the rates."""
        weights = constants((*self._weights, *self._rates), out.device)
        torch.cat([*(one.to(out.dtype) for one in self._sums), weights], out=out)

    @torch.no_grad()
    def move(self, written: Tensor) -> None:
        """written: (size,) by all ranks, summed up. What none of them has added to stays as it is."""
        if not self._buffers:
            return
        here = torch.cat(self._buffers)
        sums, of_buffers = written.to(here.dtype).split([len(here), 2 * len(self._buffers)])
        weights, rates = of_buffers.view(2, -1)[:, self._owners]
        moved = here.lerp(sums / weights, rates / weights)
        copy(self._buffers, list(torch.where(weights > 0, moved, here).split(self._lengths)))


@functools.lru_cache(maxsize=1000)  # copying them to a device would make the host wait at each step
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(len(values),) float32."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def ghost_batch_norm(
    share: BatchShare,
    running: RunningStatistics | None,
    features: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """The features, each normalised by its group of share.ghost_batch_size samples.

    running: of the network that trains.
    """
    rows, channels = features.shape[:2]
    size = rows if share.count <= share.ghost_batch_size else rows // share.count * share.ghost_batch_size
    if rows % share.count and (share.alone or size < rows):
        raise InputError(
            f"ghost_batch_size must be 0 where batch norm does not get as many rows for each sample, got {rows} rows "
            f"of {share.count} samples"
        )
    if share.alone:
        shifted = features + _shift(share, features)
        running_of = running_mean, running_var  # which a trial leaves as they are
        return batch_norm(
            share, nullcontext, shifted, weight, bias, *running_of, training, momentum, eps, cudnn_enabled
        )
    groups = features.split(size)
    dtype = torch.promote_types(features.dtype, torch.float32) if weight is None else weight.dtype
    moments = features.new_zeros(len(groups), 2, channels, dtype=dtype)  # torch's kernels write mean and variance there
    normalised = [
        PLAIN(group, weight, bias, *of_group, training, 1.0, eps, cudnn_enabled)
        for group, of_group in zip(groups, moments, strict=True)
    ]
    if running and running_mean is not None and running_var is not None and not share.borrowed:
        counts = [group.numel() // channels for group in groups]
        if counts[-1] == 1:
            moments = moments.nan_to_num()  # a single value has no variance
        factors = constants(tuple(factor for count in counts for factor in (count, count - 1)), features.device)
        means, variances = (moments * factors.view(-1, 2, 1)).sum(0)
        running.add(running_mean, means, sum(counts), momentum)
        running.add(running_var, variances, sum(counts) - len(counts), momentum)
    return normalised[0] if len(normalised) == 1 else torch.cat(normalised)


def _shift(share: BatchShare, features: Tensor) -> Tensor:
    """What a trial adds to the features: by sample, so that rows in another order than the samples are found out."""
    positions = torch.linspace(0, 1, share.size, dtype=torch.float32)[share.first : share.first + share.count]
    by_row = positions.repeat_interleave(len(features) // share.count)
    shift = torch.outer(by_row, torch.linspace(1, 2, features.shape[1], dtype=torch.float32))
    return shift.view(*shift.shape, *[1] * (features.ndim - 2)).to(features)
