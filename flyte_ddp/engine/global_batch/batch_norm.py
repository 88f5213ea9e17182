"""Batch norm over the global batch: the ranks add up their sums, forward and backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.torch_compat import original

Waiting = Callable[[], AbstractContextManager[None]]
PLAIN = original(torch.ops.aten.batch_norm.default)


def is_plain(share: BatchShare, features: Tensor) -> bool:
    """Whether the rank's samples are the batch: torch's own kernel does all at once, but refuses a single row."""
    is_lone = share.statistics is None if share.alone else distributed.get_world_size() == 1
    return is_lone and features.numel() > features.shape[1]


def batch_norm(
    share: BatchShare,
    waiting: Waiting,
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
    """What torch.batch_norm returns, and does to the running statistics, for this rank's samples of the global batch.

    waiting: entered while the ranks exchange their sums. torch's own SyncBatchNorm does the same, but only on GPUs.
    """
    channels = features.shape[1]
    if not training or is_plain(share, features):
        plain: Tensor = PLAIN(features, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
        return plain
    weight = torch.ones(channels, dtype=torch.float32, device=features.device) if weight is None else weight
    bias = torch.zeros(channels, dtype=torch.float32, device=features.device) if bias is None else bias
    if share.alone:
        layer = channels if running_mean is None else id(running_mean)
        mean, variance = (share.statistics or _of_one_value)(features.detach(), layer)
        return _fixed(features, weight, bias, mean, variance, eps)
    normalised, mean, variance, count = Normalise.apply(features, weight, bias, eps, share.borrowed, waiting)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum)  # one sample has none
    return normalised


def _of_one_value(features: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """With which the features stay as they are, but for eps: mean 0 and variance 1."""
    zeros = torch.zeros(features.shape[1], dtype=torch.float32, device=features.device)
    return zeros, torch.ones_like(zeros)


def statistics_of(features: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance by channel, both float32; 0 and 1 of what has no variance."""
    if features.numel() <= features.shape[1]:
        return _of_one_value(features, layer)
    variance, mean = torch.var_mean(features.float(), [0, *range(2, features.ndim)], correction=0)
    return mean, variance


class Normalise(torch.autograd.Function):
    """Batch norm (Ioffe and Szegedy, 2015) with the statistics of all ranks; also returns mean, variance and count.

    The backward pass is written out, because autograd takes twice as long. torch's kernels for fixed statistics do the
    work: the gradient through the batch's statistics adds a linear function of the features, channel by channel. To
    these statistics a borrowed sample adds nothing, neither forward nor backward.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, eps: float, borrowed: bool, waiting: Waiting
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rows = 0 if borrowed else features.numel() // len(weight)
        if rows:
            # an undocumented kernel of torch: a single launch, and on a CPU faster than sums
            local = torch.stack(torch.batch_norm_update_stats(features.float(), None, None, 0.0)).double()
        else:
            local = torch.zeros(2, len(weight), dtype=torch.float64, device=weight.device)
        # in float64: for features far from 0, the mean square minus the squared mean has few digits left
        local[1].addcmul_(local[0], local[0])
        sums = torch.cat([local.flatten(), local.new_ones(1)]).mul_(rows)
        with waiting():
            distributed.all_reduce(sums)
        moments, count = sums[:-1].view(2, -1) / sums[-1:], sums[-1:].float()
        moments[1].addcmul_(moments[0], moments[0], value=-1)
        mean, variance = moments.float()
        ctx.save_for_backward(features, weight, mean, variance, count)
        ctx.eps, ctx.borrowed, ctx.waiting = eps, borrowed, waiting
        normalised = _fixed(features, weight, bias, mean, variance, eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        features, weight, mean, variance, count = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(ctx, gradient, features, weight, count), None, None, None
        scale = (variance + ctx.eps).rsqrt()
        if len(features):  # CUDA needs mean and scale although they follow from the others
            through, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, features, weight, mean, variance, mean, scale, False, ctx.eps, [True, True, True]
            )
        else:
            through, to_weight, to_bias = gradient, torch.zeros_like(weight), torch.zeros_like(weight)
        sums = torch.stack([to_weight, to_bias])
        if ctx.borrowed:
            sums.zero_()
        with ctx.waiting():
            distributed.all_reduce(sums)
        slope, offset = sums * (weight * scale / -count)
        if not ctx.borrowed:
            through = _fixed(features, slope, offset, mean, variance, ctx.eps).add_(through)
        return through, to_weight, to_bias, None, None, None


def _differentiable(ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """What Normalise.backward returns, in operations that autograd follows, for the gradients of gradients."""
    over, by_channel = [0, *range(2, features.ndim)], (1, -1, *[1] * (features.ndim - 2))

    def mean_of(values: Tensor) -> Tensor:
        total: Tensor = _Sum.apply((values[:0] if ctx.borrowed else values).sum(over), ctx.waiting)
        return (total / count).view(by_channel)

    slopes, wide = gradient.double(), features.double()  # float64: see forward
    centred = wide - mean_of(wide)
    scale = (mean_of(centred.square()) + ctx.eps).rsqrt()
    normalised = centred * scale
    coupled = mean_of(slopes) + normalised * mean_of(slopes * normalised)
    coupled = coupled * (not ctx.borrowed)  # 0, but a part of the graph, so that all ranks sum up alike on the way back
    through = (slopes - coupled) * scale * weight.view(by_channel)
    to_weight, to_bias = (slopes * normalised).sum(over), slopes.sum(over)
    return through.to(features.dtype), to_weight.to(weight.dtype), to_bias.to(weight.dtype)


class _Sum(torch.autograd.Function):
    """The sum over all ranks, each of which has a loss that depends on it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, waiting: Waiting) -> Tensor:
        ctx.waiting, total = waiting, local.clone()
        with waiting():
            distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.waiting), None


def _fixed(features: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """(features - mean) / sqrt(variance + eps) * weight + bias, by channel."""
    if not len(features):
        return features.clone()
    return F.batch_norm(features, mean, variance, weight, bias, training=False, eps=eps)
