"""Layers whose result does not depend on how many ranks share a batch: each sees the global batch as one."""

import torch
from torch import Tensor, nn


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
        from torch.distributed.nn.functional import all_reduce

        assert self.running_mean is not None  # for the type checker: they are there unless asked away
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        x, axes, momentum = features.float(), (0, 2, 3), self.momentum or 0.0
        count = x.new_tensor([x.numel() / self.num_features])
        sums, squares, count = all_reduce(torch.cat([x.sum(axes), x.square().sum(axes), count])).split(
            [self.num_features, self.num_features, 1]
        )
        mean = sums / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * count / (count - 1), momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        offset = self.bias - mean * scale
        return torch.addcmul(offset.view(1, -1, 1, 1), x, scale.view(1, -1, 1, 1)).to(features.dtype)
