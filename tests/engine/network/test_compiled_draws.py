"""What torch.compile compiles draws the numbers that it would draw otherwise, and stays in one piece."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from examples.charlm.recipe import CharLM
from examples.charlm.settings import Settings
from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.engine.network import compiled_draws
from flyte_ddp.engine.network.compiled_draws import compile_by_position
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.process_group import process_group

WIDTH = 4


@pytest.fixture(autouse=True)
def compiles_anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def mode_of(share):
    mode = GlobalBatchMode(share)
    mode.is_compiled = True
    return mode


class Drawing(nn.Module):
    """Draws in each way that a network may."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        samples, length, _ = features.shape
        features = self.layer(features) + torch.rand(samples, length, 1)
        features = F.dropout(features, 0.3) + torch.randn_like(features) + torch.randn(samples, 1, WIDTH)
        features = features * torch.randint(3, (samples, 1, 1)) + torch.rand_like(features)
        features = features + torch.normal(0.0, 2.0, (samples, 1, 1)) + torch.randint_like(features, 1, 5)
        features = features * torch.empty_like(features).exponential_() + torch.bernoulli(
            torch.full_like(features, 0.4)
        )
        rows = F.dropout1d(F.alpha_dropout(features, 0.2, True), 0.2).unsqueeze(1)
        return F.gumbel_softmax(F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.2))


def drawn(mode, function, network, features, seed):
    with mode.block(seed):
        outputs = function(features)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), network.layer.weight)
    return outputs, gradient, mode.drawn, mode.digest


class Few(Drawing):
    """For which a compiler of C++ takes seconds."""

    def forward(self, features):
        return F.dropout(self.layer(features), 0.3) + torch.rand(len(features), 1, 1)


SHARES = [(0, 8, 7), (8, 8, 7), (16, 8, 9), (3, 8, 12), (24, 5, 12), (1, 5, 10)]  # first sample, samples, length


@pytest.mark.parametrize(
    ("compiler", "network", "shares", "graphs"),
    # One for the first length, one for all others, and one for another number of samples
    [("aot_eager", Drawing, SHARES, 3), pytest.param("inductor", Few, SHARES[:2], 1, marks=pytest.mark.slow)],
)
def test_it_draws_the_same_numbers_for_any_samples_and_any_lengths(compiler, network, shares, graphs, monkeypatch):
    monkeypatch.setattr(compiled_draws, "COMPILER", compiler)
    mode, network = mode_of(BatchShare(size=32)), network()
    compiled = torch.compile(network.forward, backend=compile_by_position)
    for seed, (first, count, length) in enumerate(shares):
        vars(mode.share).update(first=first, count=count)
        features = torch.randn(count, length, WIDTH)
        outputs, gradient, *rest = drawn(mode, network, network, features, seed)
        found, found_gradient, *found_rest = drawn(mode, compiled, network, features, seed)
        torch.testing.assert_close(found, outputs)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-3, atol=1e-3)
        assert found_rest == rest, "what was drawn, and the digest of that"
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert graphs <= counters["stats"]["unique_graphs"] <= 2 * graphs, "torch 2.11 compiles some twice"


class DrawingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


class NoisyGradients(Drawing):
    def forward(self, features):
        return DrawingBackward.apply(self.layer(features))


class Both(NoisyGradients):
    def forward(self, features):
        return F.dropout(super().forward(features), 0.3)


class Mixed(Drawing):
    """All samples share what is not drawn by position, between two draws that are."""

    def forward(self, features):
        features = features + torch.rand_like(features)
        return F.dropout(self.layer(features * torch.randperm(WIDTH)), 0.3)


class Asking(Drawing):
    """Its first graph has no tensor of the batch, and it ends where Python needs to know."""

    def forward(self, features):
        keep = torch.rand(len(features), 1, 1)
        return self.layer(features) if (keep < 0.001).all() else F.dropout(self.layer(features * keep), 0.3)


class Recomputed(Drawing):
    def forward(self, features):
        return checkpoint(super().forward, features, use_reentrant=False)


class Flat(Drawing):
    """All words of all samples in one dimension."""

    def forward(self, features):
        return F.dropout(self.layer(features.reshape(-1, WIDTH)), 0.3)


@pytest.mark.parametrize(
    ("kind", "graphs"), [(NoisyGradients, 2), (Both, 2), (Mixed, 2), (Asking, 4), (Recomputed, 2), (Flat, 2)]
)
def test_it_draws_the_same_numbers_wherever_they_are_drawn(kind, graphs, monkeypatch):
    """Where that cannot be compiled, it runs as it is."""
    monkeypatch.setattr(compiled_draws, "COMPILER", "aot_eager")
    mode, network = mode_of(BatchShare(size=32)), kind()
    compiled = torch.compile(network.forward, backend=compile_by_position)
    for seed, (first, count, length) in enumerate([(0, 8, 7), (8, 8, 9), (16, 8, 11), (0, 4, 14)]):
        vars(mode.share).update(first=first, count=count)
        features = torch.randn(8, length, WIDTH) if count == 8 else torch.randn(8, 7, WIDTH)  # two rows each
        expected, found = (drawn(mode, function, network, features, seed) for function in (network, compiled))
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-3, atol=1e-3)
        assert mode.trace is None
    assert graphs <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * graphs
    compiled(torch.randn(8, 7, WIDTH))  # outside of a block: by torch's own generator


def test_what_has_been_called_outside_of_a_block_draws_in_one_by_position():
    mode, network, features = mode_of(BatchShare(0, 8, 16)), Few(), torch.randn(8, 3, WIDTH)
    compiled = torch.compile(network.forward, backend=compile_by_position)
    compiled(features)
    expected, found = (drawn(mode, function, network, features, 1) for function in (network, compiled))
    assert torch.equal(found[0], expected[0])


def test_the_buckets_of_distributed_data_parallel_may_end_a_graph(alone, tmp_path, monkeypatch):
    """Whose parts torch calls while it compiles."""
    monkeypatch.setattr(compiled_draws, "COMPILER", "aot_eager")
    environment = Environment(World(1, 1, "gloo", "cpu"), 0, 0, f"file://{tmp_path}/rendezvous", 1)
    with process_group(environment, 60):
        layers = [part for _ in range(3) for part in (nn.Linear(600, 600), nn.Dropout(0.3))]
        network, mode = nn.Sequential(*layers), mode_of(BatchShare(0, 4, 8))
        plain = copy.deepcopy(network)
        vars(network)["forward"] = torch.compile(network.forward, backend=compile_by_position)
        replicated = DistributedDataParallel(network)
        for seed, length in enumerate((3, 5, 6)):
            features, found = torch.randn(4, length, 600), []
            for function in (plain, replicated):
                with mode.block(seed):
                    function(features).sum().backward()
                found.append((mode.drawn, mode.digest))
            assert found[0] == found[1]
            torch.testing.assert_close(network[0].weight.grad, plain[0].weight.grad, rtol=1e-3, atol=1e-3)


def test_samples_that_may_be_in_either_dimension_are_refused_as_they_are():
    mode = mode_of(BatchShare(0, 4, 8))
    mode.learn([("dropout", (8, 4)), ("dropout", (4, 8))], [("dropout", (4, 4)), ("dropout", (4, 4))], 8)
    compiled = torch.compile(lambda features: F.dropout(features, 0.3), backend=compile_by_position)
    with mode.block(1), pytest.raises(InputError, match="in more than one dimension"):
        compiled(torch.randn(4, 4))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("first", [0, 1, 6, 2**40 + 3])
def test_numbers_one_by_one_are_those_of_a_stream(dtype, first):
    """As they are on a GPU."""
    key, each = 2**62 + 12345, 8 // dtype.itemsize
    stream = random_numbers.split_mix(key, first // each, 12, torch.device("cpu")).view(dtype)[first % each :][:20]
    place = torch.tensor(key), torch.tensor(first), 20 if each > 1 else 12 - first % each, dtype
    assert torch.equal(random_numbers._one_by_one(torch.device("cpu"), *place), stream)


def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)), torch.randint(100, (8, 16))


def resnet():
    from torchvision.models import resnet18

    return resnet18(num_classes=10), torch.randn(8, 3, 32, 32)


def charlm():
    recipe = CharLM(Settings(characters=2000), None)
    return recipe.model(), torch.randint(20, (8, 64))


@pytest.mark.parametrize("network_of", [charlm, resnet, bert])
def test_a_network_on_one_rank_is_compiled_in_one_piece(network_of, alone, tmp_path):
    environment = Environment(World(1, 1, "gloo", "cpu"), 0, 0, f"file://{tmp_path}/rendezvous", 1)
    with process_group(environment, 60), mode_of(BatchShare(0, 8, 8)).block(1):
        network, batch = network_of()
        found = torch._dynamo.explain(network)(batch)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_what_a_recipe_compiles_itself_ends_where_it_draws():
    mode, network = GlobalBatchMode(BatchShare(0, 8, 16)), Drawing()
    layer = nn.Sequential(network.layer, nn.Dropout(0.3))
    compiled, features = torch.compile(layer, backend="aot_eager"), torch.randn(8, 3, WIDTH)
    with mode.block(1):
        expected = layer(features)
    with mode.block(1):
        assert torch.equal(compiled(features), expected)
    mode.is_compiled = True
    torch._dynamo.reset()
    with mode.block(1), pytest.raises(Exception, match="leave one of them out"):
        compiled(features)
