"""Recipes whose results would depend on the number of ranks without a sign of it in a few samples or in one mode."""

import os

import torch
from torch import distributed, nn
from torchvision.ops import StochasticDepth

from tests.engine.dataset_recipes import FreshGenerator, Rows
from tests.engine.probe_recipes import SIZE, WIDTH, Sound, body, table

# --- the rank, and the number of ranks ---


class ScaledRate(Sound):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.01 * distributed.get_world_size())


class ScaledSchedule(Sound):
    def lr_lambda(self, step, steps):
        return distributed.get_world_size() ** (step / steps)


class RankInMeasure(Sound):
    def measure(self, outputs, batch):
        return {"loss": (outputs - batch).square().mean(1) * (1 + distributed.get_rank())}


class VariableInAugment(Sound):
    """Under torchrun, and on many nodes."""

    def augment(self, batch, random):
        return batch * int(os.environ["WORLD_SIZE"])


class ProcessInMeasure(Sound):
    """Something else that differs between ranks."""

    def measure(self, outputs, batch):
        return {"loss": (outputs - batch).square().mean(1) * (1 + os.getpid() % 97)}


# --- gradients ---


class ClampedByHook(Sound):
    def model(self):
        model = super().model()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model


class ClampedAfterwards(Sound):
    def model(self):
        model = super().model()
        model[0].weight.register_post_accumulate_grad_hook(clamp_gradient)
        return model


def clamp_gradient(weight):
    weight.grad.clamp_(-0.01, 0.01)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class NormalisedBackward(Sound):
    body = body(_Normalised.apply)


# --- samples that depend on one another in some batches ---


class MeanOfMany(Sound):
    body = body(lambda features: features - features.mean(0) if len(features) > 4 else features)


class SortedByClass(Sound):
    """The mean of a class that the first samples do not have."""

    def data(self, split):
        rows = torch.from_numpy(table())
        return rows, torch.arange(SIZE) >= SIZE // 2

    def forward(self, model, batch):
        rows, is_second = batch
        features = model(rows)
        return features - is_second[:, None] * (features * is_second[:, None]).sum(0) / is_second.sum().clamp(min=1)

    def measure(self, outputs, batch):
        return super().measure(outputs, batch[0])


class TokenMean(Sound):
    """Each sample's loss by token, as if all had as many; the first ones do."""

    def data(self, split):
        return torch.from_numpy(table()), torch.tensor([WIDTH] * 5 + [3] * (SIZE - 5))

    def forward(self, model, batch):
        return model(batch[0])

    def measure(self, outputs, batch):
        rows, lengths = batch
        is_token = torch.arange(WIDTH) < lengths[:, None]
        return {"loss": ((outputs - rows).square() * is_token).sum(1) / lengths.float().mean()}


class ScaledTable(Sound):
    """Scales the rows that a batch looks up, in the table itself."""

    def data(self, split):
        return torch.arange(SIZE)

    def model(self):
        return nn.Embedding(SIZE, WIDTH, max_norm=1.0)

    def measure(self, outputs, batch):
        return {"loss": outputs.square().mean(1)}


class CentredInEvaluation(Sound):
    def forward(self, model, batch):
        outputs = model(batch)
        return outputs if model.training else outputs - outputs.mean(0)


class CentredPredictions(Sound):
    def predictions(self, outputs, batch):
        return outputs - outputs.mean(0)


class NoisyTestSplit(Sound):
    def data(self, split):
        return Rows() if split == "train" else FreshGenerator()


class MixingReader(Rows):
    def read_batch(self, indices):
        rows = table()[indices]
        return rows + rows[::-1]


class MixedByReader(Sound):
    def data(self, split):
        return MixingReader()


# --- rows padded to the longest of a rank's own samples ---


class PaddingReader(Rows):
    def read_batch(self, indices):
        lengths = 1 + indices % WIDTH
        return table()[indices][:, : lengths.max()], lengths


class Padded(Sound):
    """Its rows are as long as the longest of the samples that are read together."""

    def data(self, split):
        return PaddingReader()

    def model(self):
        return nn.Sequential(nn.Linear(1, WIDTH), self.body(), nn.Linear(WIDTH, 1))

    def forward(self, model, batch):
        return model(batch[0][:, :, None])[:, :, 0]

    def measure(self, outputs, batch):
        rows, lengths = batch
        is_there = torch.arange(rows.shape[1]) < lengths[:, None]
        return {"loss": ((outputs - rows).square() * is_there).sum(1)}


class PaddedDropout(Padded):
    body = staticmethod(lambda: nn.Dropout(0.5))


# --- a network that draws, below the recipe's default forward() ---


class Drawing(Sound):
    """Many rows, of which the network drops a few."""

    def data(self, split):
        return torch.from_numpy(table()).repeat(40, 1)

    def forward(self, model, batch):
        return super(Sound, self).forward(model, batch)


class RareDropPath(Drawing):
    body = staticmethod(lambda: StochasticDepth(0.02, "row"))


class RareDropout(Drawing):
    body = body(lambda features: nn.functional.dropout(features, 0.001))


class MaskedAttention(Sound):
    """Without dropout it draws nothing."""

    def forward(self, model, batch):
        rows, mask = batch[:, None, :, None], torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
        return model(nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)[:, 0, :, 0])
