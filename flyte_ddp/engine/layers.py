"""Makes torch's layers independent of how many ranks share a batch: each layer sees the global batch."""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from flyte_ddp.engine.torch_compat import AnyBatchNorm
from flyte_ddp.share import Share


def convert(model: nn.Module, share: Share) -> nn.Module:
    """Makes the network's Dropout, BatchNorm and MultiheadAttention layers see the global batch; names don't change.

    Before each training step, the ranks' generators must be in the same state and share must be set.
    """
    for layer in model.modules():
        layer.__class__ = CONVERTED.get(type(layer), type(layer))
        if type(layer) in CONVERTED.values():
            layer.share = share  # type: ignore[assignment]
    return model


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(layer, BatchNorm) for layer in model.modules())


def dropout(features: Tensor, p: float, shape: Tuple[int, ...], share: Share) -> Tensor:
    """Zeroes a share p of features (n, ...), or (n * k, ...) with k rows per sample, and scales up the rest.

    shape: of a row of the mask, which is drawn for the whole global batch.
    """
    rows = len(features)
    if rows % share.count:
        raise ValueError(
            f"dropout: the first dimension has to be the {share.count} samples, or a multiple, got "
            f"{tuple(features.shape)}: use batch_first=True, or move the samples to the front"
        )
    each = rows // share.count
    mask = torch.rand(share.size * each, *shape, device=features.device) >= p
    return features * mask[share.first * each : share.first * each + rows] / (1 - p or 1)


class Dropout(nn.Dropout):
    share: Share

    def forward(self, features: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return features
        return dropout(features, self.p, features.shape[1:], self.share)


class ChannelDropout(nn.Dropout):
    """Dropout1d, 2d and 3d: whole channels of features (n, C, ...)."""

    share: Share

    def forward(self, features: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return features
        shape = features.shape[1:2] + (1,) * (features.ndim - 2)
        return dropout(features, self.p, shape, self.share)


class Attention(nn.MultiheadAttention):
    """MultiheadAttention, whose dropout is a function call, not a layer."""

    share: Share

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or self.dropout == 0:
            return super().forward(*args, **kwargs)
        with _global_dropout(self.share):
            return super().forward(*args, **kwargs)


@contextmanager
def _global_dropout(share: Share) -> Iterator[None]:
    """While the block runs, torch.nn.functional's dropout and attention draw their masks for the global batch.

    There is no other way into multi_head_attention_forward: torch's function modes intercept it only as a whole.
    """
    theirs = F.dropout, F.scaled_dot_product_attention

    def drop(features: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropout(features, p, features.shape[1:], share) if training and p else features

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return drop(scores.softmax(-1), dropout_p) @ value

    F.dropout, F.scaled_dot_product_attention = drop, attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = theirs


class BatchNorm(AnyBatchNorm):
    """Batch norm over the global batch: the ranks add up their sums, forward and backward.

    torch's own SyncBatchNorm does the same, but only on GPUs. A frozen layer uses its running statistics in place of
    the batch's, and does not change them.
    """

    share: Share
    is_frozen = False

    def forward(self, features: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(features)
        if self.is_frozen and self.running_mean is not None:
            assert self.running_var is not None  # for the type checker: there are both or neither
            return _fixed(features, self.weight, self.bias, self.running_mean, self.running_var, self.eps)
        rows = features.numel() // self.num_features
        # torch's own kernel does everything at once, but refuses a single row
        if not self.share.alone and rows > 1 and distributed.get_world_size() == 1:
            return super().forward(features)
        weight = self.weight if self.affine else torch.ones(self.num_features, device=features.device)
        bias = self.bias if self.affine else torch.zeros(self.num_features, device=features.device)
        if self.share.alone:  # without statistics of the batch, so that samples do not affect each other
            return _fixed(features, weight, bias, torch.zeros_like(bias), torch.ones_like(bias), self.eps)
        normalised, mean, variance, count = _Normalise.apply(features, weight, bias, self.eps, self.share.borrowed)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None  # for the type checker: there are all or none
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), share)  # one sample has none
        return normalised


CONVERTED: Dict[type, Any] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: ChannelDropout,
    nn.Dropout2d: ChannelDropout,
    nn.Dropout3d: ChannelDropout,
    nn.BatchNorm1d: BatchNorm,
    nn.BatchNorm2d: BatchNorm,
    nn.BatchNorm3d: BatchNorm,
    nn.MultiheadAttention: Attention,
}


class _Normalise(torch.autograd.Function):
    """Batch norm (Ioffe and Szegedy, 2015) with the statistics of all ranks; also returns mean, variance and count.

    The backward pass is written out, because autograd takes twice as long. torch's kernels for fixed statistics do the
    work: the gradient through the batch's statistics adds a linear function of the features, channel by channel. To
    these statistics a borrowed sample adds nothing, neither forward nor backward.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, eps: float, borrowed: bool
    ) -> Tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rows = 0 if borrowed else features.numel() // len(weight)
        if rows:
            # an undocumented kernel of torch: a single launch, and on a CPU faster than sums
            mine = torch.stack(torch.batch_norm_update_stats(features.float(), None, None, 0.0)).double()
        else:
            mine = torch.zeros(2, len(weight), dtype=torch.float64, device=weight.device)
        # in float64: for features far from 0, the mean square minus the squared mean has few digits left
        mine[1].addcmul_(mine[0], mine[0])
        sums = torch.cat([mine.flatten(), mine.new_ones(1)]).mul_(rows)
        distributed.all_reduce(sums)
        moments, count = sums[:-1].view(2, -1) / sums[-1:], sums[-1:].float()
        moments[1].addcmul_(moments[0], moments[0], value=-1)
        mean, variance = moments.float()
        ctx.save_for_backward(features, weight, mean, variance, count)
        ctx.eps, ctx.borrowed = eps, borrowed
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
        sums = torch.stack([to_weight, to_bias])
        distributed.all_reduce(sums)
        slope, offset = sums * (weight * (variance + ctx.eps).rsqrt() / -count)
        if not ctx.borrowed:
            through = _fixed(features, slope, offset, mean, variance, ctx.eps).add_(through)
        return through, to_weight, to_bias, None, None


def _fixed(features: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """(features - mean) / sqrt(variance + eps) * weight + bias, by channel."""
    if not len(features):
        return features.clone()
    return F.batch_norm(features, mean, variance, weight, bias, training=False, eps=eps)
