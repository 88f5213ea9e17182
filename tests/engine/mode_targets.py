"""What test_mode.py has ranks do: each function is a worker's."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import StochasticDepth

from flyte_ddp.batch_share import BatchShare, gather_rows
from flyte_ddp.engine.batches.batches import EvaluationBatches
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from tests.on_cuda import AsOnCuda

CPU = torch.device("cpu")


class RowsOfASample(nn.Module):
    """Dropout of features (n * 3, 4): three rows of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, features: Tensor) -> Tensor:
        return self.dropout(features.flatten(0, 1)).unflatten(0, (-1, 3))


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool, batch_first: bool = True):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first)
        self.need_weights, self.batch_first = need_weights, batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        attended: Tensor = self.attention(tokens, tokens, tokens, need_weights=self.need_weights)[0]
        return attended if self.batch_first else attended.transpose(0, 1)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        features: Tensor = self.layer(tokens, src_mask=mask, is_causal=True)
        return features


class Applied(nn.Module):
    """A function of features (n, ...), as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, features: Tensor) -> Tensor:
        return self.function(features)


class SamplesSecond(nn.Module):
    """A layer that returns a tuple and has the samples in the second dimension, behind time."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, features: Tensor) -> Tensor:
        found = self.layer(features.transpose(0, 1))
        return (found[0] if isinstance(found, tuple) else found).transpose(0, 1)


class Derived(nn.BatchNorm1d):
    """As other libraries derive theirs."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).relu()


class Slopes(nn.Module):
    """What a penalty on gradients, or a network of forces, computes with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, eps=0.5)

    def forward(self, features: Tensor) -> Tensor:
        energy = self.norm(features).tanh().sum()
        slopes: Tensor = torch.autograd.grad(energy, features, create_graph=True)[0]
        return slopes


def drop_path(features: Tensor) -> Tensor:
    return features * features.new_empty(len(features), 1, 1).bernoulli_(0.5)


# Networks of torch's own layers, and of what other libraries do, and the shape of a sample
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Dropout(0.4), (3, 4)),
    "dropout of rows": (RowsOfASample, (3, 4)),
    "dropout in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4, inplace=True)), (4,)),
    "dropout 1d": (lambda: nn.Dropout1d(0.4), (6, 4)),
    "dropout 2d": (lambda: nn.Dropout2d(0.4), (6, 4, 2)),
    "dropout 3d": (lambda: nn.Dropout3d(0.4), (6, 2, 4, 2)),
    # eps: two samples may have nearly the same features, whose gradients are then rounding errors
    "batch norm of features": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=0.01)), (4,)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(5), (5, 4)),
    "batch norm 2d": (lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU()), (2, 5, 4)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(5), (5, 2, 3, 2)),
    "slopes of batch norm": (Slopes, (4,)),
    "slopes of batch norm 1d": (Slopes, (4, 3)),
    "attention": (lambda: SelfAttention(need_weights=False), (5, 8)),
    "attention with weights": (lambda: SelfAttention(need_weights=True), (5, 8)),
    "attention, samples second": (lambda: SelfAttention(need_weights=False, batch_first=False), (5, 8)),
    "transformer": (Causal, (5, 8)),
    "transformer, samples second": (lambda: SamplesSecond(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)), (5, 8)),
    "LSTM with dropout": (lambda: SamplesSecond(nn.LSTM(8, 4, num_layers=2, dropout=0.5)), (5, 8)),
    "derived batch norm": (lambda: Derived(5), (5, 4)),
    "functional dropout": (lambda: Applied(lambda features: functional.dropout(features, 0.4)), (3, 4)),
    "all of it dropped": (lambda: nn.Dropout(1.0), (3, 4)),
    "alpha dropout": (lambda: nn.AlphaDropout(0.4), (3, 4)),
    "alpha dropout of channels": (lambda: nn.FeatureAlphaDropout(0.4), (3, 4)),
    "drop path": (lambda: Applied(drop_path), (3, 4)),
    "stochastic depth": (lambda: StochasticDepth(0.4, "row"), (3, 4)),
    "stochastic depth of the batch": (lambda: StochasticDepth(0.4, "batch"), (3, 4)),
    "uniform noise": (lambda: Applied(lambda features: features + torch.rand_like(features)), (3, 4)),
    "normal noise": (lambda: Applied(lambda features: features + torch.randn(features.shape)), (3, 4)),
    "integers": (lambda: Applied(lambda features: features * torch.randint(9, features.shape)), (3, 4)),
    "a mask by sample": (lambda: Applied(lambda features: features * torch.bernoulli(features.sigmoid())), (3, 4)),
    "Gumbel softmax": (lambda: Applied(functional.gumbel_softmax), (3, 4)),
    "a distribution": (lambda: Applied(lambda features: torch.distributions.Normal(features, 1.0).rsample()), (3, 4)),
}


class Computed(NamedTuple):
    """Arrays of this rank's samples, those of its weights' gradients by name, and all that is in its state_dict."""

    outputs: np.ndarray
    input_gradients: np.ndarray
    weight_gradients: dict[str, np.ndarray]
    state: dict[str, np.ndarray]


def compute(environment: Environment, link: Link, size: int) -> dict[str, Computed]:
    """A training step with each case, on this rank's share of a global batch of so many samples."""
    found = {}
    share, mine = share_of(environment, size)
    with process_group(environment, 60):
        for name, (build, shape) in CASES.items():
            torch.manual_seed(0)
            model = build().train()
            inputs, slopes = torch.randn(2, size, *shape)
            rows = GlobalBatchMode(share)
            if name in UNUSUAL:
                learn(rows, model, inputs)
            inputs, slopes = inputs[mine].requires_grad_(), slopes[mine]
            with AsOnCuda():
                with rows.block(1):
                    outputs = model(inputs)
                share.own(outputs.flatten(1).cumsum(1) * slopes.flatten(1)[:, :1]).sum().backward()
            assert inputs.grad is not None
            found[name] = Computed(
                share.own(outputs).detach().numpy(),
                share.own(inputs.grad).numpy(),
                {key: np.asarray(weight.grad) for key, weight in model.named_parameters()},
                {key: value.numpy() for key, value in model.state_dict().items()},
            )
    return found


def gather(environment: Environment, link: Link, size: int) -> list[bool]:
    """Whether all_gather()'s rows of many types, and of single numbers, are those of the global batch."""
    share, mine = share_of(environment, size)
    kinds = torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64
    with process_group(environment, 60):
        wholes = [torch.arange(3 * size).view(size, 3).to(kind) for kind in kinds] + [torch.arange(size)]
        return [torch.equal(gather_rows(whole[mine], share), whole) for whole in wholes]


def penalise(environment: Environment, link: Link, size: int) -> np.ndarray:
    """The gradient, for this rank's samples, of a penalty on gradients that pass through all_gather()."""
    share, mine = share_of(environment, size)
    with process_group(environment, 60):
        torch.manual_seed(0)
        features = torch.randn(size, 4)[mine].requires_grad_()
        energy = share.own((features @ gather_rows(features, share).T).tanh()).sum()
        (slopes,) = torch.autograd.grad(energy, features, create_graph=True)
        share.own(slopes).square().sum().backward()
    assert features.grad is not None
    return share.own(features.grad).numpy()


UNUSUAL = (
    "attention, samples second",
    "transformer, samples second",
    "LSTM with dropout",
    "stochastic depth of the batch",
)


def learn(rows: GlobalBatchMode, model: nn.Module, inputs: Tensor) -> None:
    """Shows rows where the samples are in what the model draws, as a probe does."""
    drawn, share = [], rows.share
    mine, size = dict(vars(share)), len(inputs)
    for count in (size, size // 2):
        vars(share).update(first=0, count=count, size=size)
        with rows.block(0), torch.no_grad():
            model(inputs[:count])
        drawn.append(rows.drawn)
    rows.learn(drawn[0], drawn[1], size)
    vars(share).update(mine)


def share_of(environment: Environment, size: int) -> tuple[BatchShare, Tensor]:
    """This rank's share of a global batch, and where its samples are in it; one of many ranks borrows a sample."""
    batches = EvaluationBatches(Resident(torch.arange(size), CPU), size, environment.rank, environment.world.size)
    (batch,) = batches
    return batch.share, batch.tree


KINDS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 0.5},
]


def compare_with_torch(environment: Environment, link: Link, argument: Any) -> list[tuple[Any, Any]]:
    """Ours and torch's: outputs, gradients and state of two training steps and an evaluation, by kind of batch norm."""
    with process_group(environment, 60):
        return [(batch_norm(kind, ours=True), batch_norm(kind, ours=False)) for kind in KINDS]


def batch_norm(kind: dict[str, Any], ours: bool) -> list[np.ndarray]:
    torch.manual_seed(0)
    layer: nn.Module = nn.BatchNorm2d(3, **kind)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.uniform_(0.5, 2)
    rows = GlobalBatchMode(BatchShare(0, 8, 8))
    found = []
    for number in range(3):
        layer.train(number < 2)
        # far from 0, as years and prices are
        inputs = (torch.randn(8, 3, 4, 4) + torch.tensor([0.0, 100.0, 3000.0]).view(1, 3, 1, 1)).requires_grad_()
        slopes = torch.randn(8, 3, 4, 4)
        with rows.block(0) if ours else nullcontext():
            outputs = layer(inputs)
        (outputs * slopes).sum().backward()
        torch.manual_seed(number)  # a block has its own
        found += [outputs, inputs.grad, *(weight.grad for weight in layer.parameters()), *layer.buffers()]
    return [value.detach().clone().numpy() for value in found if value is not None]


def normalise_one_sample(environment: Environment, link: Link, argument: Any) -> list[float]:
    """Running variance after batches of eight samples, and of a single one in the end."""
    layer = nn.BatchNorm1d(2)
    with process_group(environment, 60):
        for size in (8, 1):
            with GlobalBatchMode(BatchShare(0, size, size)).block(0):
                layer(torch.randn(size, 2))
    found: list[float] = dict(layer.named_buffers())["running_var"].tolist()
    return found


def normalise_in_bfloat16(environment: Environment, link: Link, size: int) -> dict[str, np.ndarray]:
    """A training step of convolution and batch norm under autocast, of which ranks may have to borrow a sample."""
    share, mine = share_of(environment, size)
    with process_group(environment, 60):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5))
        inputs, slopes = torch.randn(2, size, 2, 6, 6)[0, mine], torch.randn(size, 5, 4, 4)[mine]
        with GlobalBatchMode(share).block(0), torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        share.own(outputs.float() * slopes).sum().backward()
    gradients = {name: np.asarray(weight.grad) for name, weight in model.named_parameters()}
    return {**gradients, **{name: buffer.numpy() for name, buffer in model.named_buffers()}}
