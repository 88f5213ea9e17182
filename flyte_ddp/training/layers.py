"""Layers whose result does not depend on how many ranks share a batch: each sees the global batch as one."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, distributed, nn


class Dropout(nn.Dropout):
    """nn.Dropout whose mask is drawn for the whole global batch; each rank takes its own rows of it.

    Before each training step the ranks' generators have to be in the same state, and first and size set: the position
    of this rank's share in the global batch, and the samples of that.
    """

    first, size = 0, 0

    def forward(self, features: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return features
        mask = torch.rand(self.size, *features.shape[1:], device=features.device) >= self.p
        return features * mask[self.first : self.first + len(features)] / (1 - self.p)


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d over the global batch: the ranks add up their sums, forward and backward, in float32.

    torch's own SyncBatchNorm does the same on GPUs, and on them alone.
    """

    def forward(self, features: Tensor) -> Tensor:
        if not self.training:
            return super().forward(features)
        assert self.running_mean is not None  # for the type checker: they are there unless asked away
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        normalised, mean, variance, count = _Normalise.apply(features, self.weight, self.bias, self.eps)
        momentum = self.momentum or 0.0
        with torch.no_grad():
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * count / (count - 1), momentum)
            self.num_batches_tracked += 1
        return normalised


class _Normalise(torch.autograd.Function):
    """Batch norm (Ioffe and Szegedy, 2015) with statistics of all ranks; also gives these, and what they are of.

    Written out, because autograd takes twice as long for it. torch's kernels for fixed statistics do the work: with
    those of the batch the gradient is theirs and a share of the same features, channel by channel.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tuple[Tensor, ...]:
        axes, channels = (0, 2, 3), features.shape[1]
        x = features.float()
        sums = torch.cat([x.sum(axes), x.square().sum(axes), x.new_tensor([x.numel() / channels])])
        distributed.all_reduce(sums)
        total, squares, count = sums.split([channels, channels, 1])
        mean = total / count
        variance = squares / count - mean.square()
        ctx.save_for_backward(features, weight, mean, variance, count)
        ctx.eps = eps
        normalised = _fixed(features, weight, bias, mean, variance, eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Tuple[Optional[Tensor], ...]:
        features, weight, mean, variance, count = ctx.saved_tensors
        if len(features):
            through, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, features, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        else:
            through, to_weight, to_bias = gradient, torch.zeros_like(weight), torch.zeros_like(weight)
        sums = torch.cat([to_weight, to_bias])
        distributed.all_reduce(sums)
        of_weight, of_bias = sums.split(len(weight))
        inverse = (variance + ctx.eps).rsqrt()
        slope = -weight * inverse.square() * of_weight / count
        offset = -weight * inverse * of_bias / count - slope * mean
        by_statistics = _fixed(features, slope, offset, torch.zeros_like(mean), torch.ones_like(variance), 0.0)
        return by_statistics.add_(through), to_weight, to_bias, None


def _fixed(features: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """(features - mean) / sqrt(variance + eps) * weight + bias, by channel."""
    if not len(features):
        return features.clone()
    return nn.functional.batch_norm(features, mean, variance, weight, bias, training=False, eps=eps)
