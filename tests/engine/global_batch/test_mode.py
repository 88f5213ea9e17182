"""What a network draws and normalises is that of the global batch, on any number of ranks."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint

from flyte_ddp import random_numbers
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode
from flyte_ddp.errors import InputError
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from tests.engine.mode_targets import CASES, KINDS


def launch(function, argument, ranks=1):
    world = World(size=ranks, local_size=ranks, backend="gloo", device="cpu")
    return launcher.launch(f"tests.engine.mode_targets:{function}", world, argument, 60, lambda event: None)


def assert_near(found, expected, about=""):
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3, err_msg=about)


@pytest.fixture(scope="module")
def computed():
    """By samples of the global batch and number of ranks: what each rank computed. One of three borrows one of two."""
    return {(size, ranks): launch("compute", size, ranks) for size in (10, 2) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("size", [10, 2])
def test_a_global_batch_gives_the_same_on_any_number_of_ranks(computed, name, ranks, size):
    (alone,) = (rank[name] for rank in computed[size, 1])
    shares = [rank[name] for rank in computed[size, ranks]]
    assert_near(np.concatenate([one.outputs for one in shares]), alone.outputs)
    assert_near(np.concatenate([one.input_gradients for one in shares]), alone.input_gradients)
    for key, gradient in alone.weight_gradients.items():
        assert_near(sum(one.weight_gradients[key] for one in shares), gradient)
    for one in shares:
        assert list(one.state) == list(alone.state) == list(CASES[name][0]().state_dict())
        for key, value in alone.state.items():
            assert_near(one.state[key], value)


@pytest.mark.parametrize("name", [name for name in CASES if "batch norm" not in name and "of the batch" not in name])
def test_dropout_drops(computed, name):
    build, shape = CASES[name]
    torch.manual_seed(0)  # as compute has it
    model = build().eval()
    undisturbed = model(torch.randn(2, 10, *shape)[0]).detach().numpy()
    assert not np.allclose(computed[10, 1][0][name].outputs, undisturbed, atol=1e-3)


def test_rows_of_any_type_can_be_gathered():
    assert all(map(all, launch("gather", 5, ranks=2)))


@pytest.mark.parametrize("size", [10, 2])
def test_a_penalty_on_gradients_through_everyone_is_the_same_on_any_number_of_ranks(size):
    alone, two, three = (np.concatenate(launch("penalise", size, ranks)) for ranks in (1, 2, 3))
    assert_near(two, alone)
    assert_near(three, alone)


def test_batch_norm_on_one_rank_is_torchs():
    for kind, (ours, theirs) in zip(KINDS, launch("compare_with_torch", None)[0], strict=True):
        assert len(ours) == len(theirs) >= 6
        for mine, expected in zip(ours, theirs, strict=True):
            assert_near(mine, expected, str(kind))


def test_a_last_batch_of_one_sample_leaves_the_running_variance_finite():
    (found,) = launch("normalise_one_sample", None)
    assert np.isfinite(found).all()


def test_batch_norm_of_bfloat16_where_ranks_have_no_sample():
    (alone,) = launch("normalise_in_bfloat16", 2)
    shares = launch("normalise_in_bfloat16", 2, ranks=3)
    for name, expected in alone.items():
        of_ranks = [one[name] for one in shares]
        found = of_ranks[0] if name.startswith("1.") and ("running" in name or "num" in name) else sum(of_ranks)
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.2, err_msg=name)


def rows_of(first, count, size):
    return GlobalBatchMode(BatchShare(first, count, size))


def test_outside_of_a_block_torch_draws_as_ever():
    rows_of(0, 4, 4)
    torch.manual_seed(0)
    drawn = [torch.rand(3), torch.nn.functional.dropout(torch.ones(3)), torch.empty(3).normal_()]
    torch.manual_seed(0)
    assert torch.equal(drawn[0], torch.rand(3))
    with rows_of(0, 3, 3).block(0):
        theirs = torch.rand(3, generator=torch.Generator().manual_seed(0))  # nor with a generator of the user's own
    assert torch.equal(drawn[0], theirs)


WRONG = {
    "uniform_": lambda: torch.empty(4).uniform_(3, 1),
    "to - 1 is out of bounds": lambda: torch.randint(0, 1000, (4,), dtype=torch.int8),
    "'from' to be less than 'to'": lambda: torch.randint(3, 3, (4,)),
    "bernoulli_ expects p": lambda: torch.empty(4).bernoulli_(1.5),
    "bernoulli: each p": lambda: torch.bernoulli(torch.tensor([0.5, 1.5, 0.5, 0.5])),
    "normal: each std": lambda: torch.normal(0.0, torch.tensor([1.0, 1.0, -1.0, 1.0])),
    "normal expects std": lambda: torch.normal(torch.ones(4), -1.0),
    "lambda > 0": lambda: torch.empty(4).exponential_(0),
    "dropout: p must be": lambda: torch.dropout(torch.ones(4), 1.5, True),
}


@pytest.mark.parametrize("told", WRONG)
def test_wrong_arguments_are_refused_as_by_torch(told):
    with rows_of(0, 4, 4).block(0), pytest.raises((RuntimeError, ValueError), match=told):
        WRONG[told]()


def test_a_normal_number_has_no_gradient_for_its_mean_as_in_torch():
    mean, std = torch.zeros(4, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    with rows_of(0, 4, 4).block(0):
        for drawn in (torch.normal(mean, std), torch.normal(mean, 1.0), torch.normal(0.0, std)):
            assert not drawn.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exponential_numbers_are_never_0_as_in_torch(monkeypatch, dtype):
    """Or Gumbel softmax, which takes their logarithms, would sooner or later return NaN."""
    monkeypatch.setattr(random_numbers, "uniform", lambda key, first, count, device: torch.linspace(0, 0.9, count))
    with rows_of(0, 4, 4).block(0):
        drawn = torch.empty(4, dtype=dtype).exponential_()
        assert torch.nn.functional.gumbel_softmax(torch.zeros(4, 5, dtype=dtype)).isfinite().all()
    assert drawn[0] > 0
    expected = -torch.log1p(-torch.linspace(0, 0.9, 4)[1:])
    torch.testing.assert_close(drawn[1:].float(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "draw",
    [
        lambda size: torch.rand(size, 3, dtype=torch.complex64),
        lambda size: torch.randn(size, 3, dtype=torch.complex64),
        lambda size: torch.zeros(size, 3, dtype=torch.complex128).normal_(1, 2),
        lambda size: torch.normal(torch.ones(size, 3, dtype=torch.complex64), 2 * torch.ones(3)),
    ],
)
def test_complex_numbers_have_two_parts_as_in_torch(draw):
    size = 20_000
    with rows_of(0, size, size).block(0):
        whole = draw(size)
    with rows_of(size // 2, size // 2, size).block(0):
        assert torch.equal(draw(size // 2), whole[size // 2 :])
    expected = draw(size)
    assert whole.dtype == expected.dtype
    for mine, theirs in zip(torch.view_as_real(whole).unbind(-1), torch.view_as_real(expected).unbind(-1), strict=True):
        torch.testing.assert_close(mine.mean(), theirs.mean(), rtol=0, atol=0.05)
        torch.testing.assert_close(mine.std(), theirs.std(), rtol=0.05, atol=0)
    assert abs(torch.corrcoef(torch.view_as_real(whole).flatten(0, 1).T)[0, 1]) < 0.05


def test_what_all_samples_share_is_equal_on_all_ranks():
    drawn = []
    for first, count in ((0, 4), (0, 3), (3, 1)):
        with rows_of(first, count, 4).block(7):
            drawn.append((torch.rand([]), torch.rand(5), torch.rand(4 * count, 2)[:4]))
    (whole, five, rows), (first_rank, its_five, _), (last_rank, _, last_rows) = drawn
    assert whole == first_rank == last_rank
    assert torch.equal(five, its_five)
    assert not torch.equal(rows, last_rows)


def test_each_call_draws_other_numbers_and_each_seed_does():
    with (rows := rows_of(0, 4, 4)).block(1):
        one, other = torch.rand(4, 2), torch.rand(4, 2)
    with rows.block(2):
        next_step = torch.rand(4, 2)
    with rows.block(1):
        assert torch.equal(torch.rand(4, 2), one)
    assert not torch.equal(one, other)
    assert not torch.equal(one, next_step)


TRIL = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": TRIL},
        {"attn_mask": TRIL.expand(4, 1, 6, 6)},
        {"attn_mask": TRIL & (torch.arange(6) > 0)},
        {"attn_mask": torch.linspace(-2, 2, 36).view(6, 6)},
        {"is_causal": True},
        {"scale": 0.9},
        {"enable_gqa": True},
    ],
)
def test_attention_that_drops_weighs_as_torchs(options, dtype):
    heads = 1 if "enable_gqa" in options else 2
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options = {**options, "attn_mask": mask.to(dtype)}
    query, key = torch.randn(4, 2, 6, 8).to(dtype), torch.randn(4, heads, 6, 8).to(dtype)
    each = torch.eye(6, dtype=dtype).expand(4, heads, 6, 6)  # so that the weights come out
    expected = attend(query, key, each, **options)
    with rows_of(0, 4, 4).block(0):
        weights = attend(query, key, each, dropout_p=0.25, **options)
    kept = weights != 0
    assert 0.6 < kept[expected > 1e-6].float().mean() < 0.9
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(weights[kept] * 0.75, expected[kept], atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_in_the_backward_pass_draws_the_same(use_reentrant):
    model, rows = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), rows_of(3, 3, 9)
    features = torch.randn(3, 4, requires_grad=True)
    gradients = []
    for call in (model, lambda features: checkpoint(model, features, use_reentrant=use_reentrant)):
        model.zero_grad()
        with rows.block(5):
            (call(features) + torch.rand(3, 2)).square().sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert torch.equal(*gradients)


def test_a_single_sample_whose_place_cannot_be_told_is_refused():
    rows = rows_of(0, 2, 2)
    drawn = []
    for count in (2, 1):
        rows.share.count = count
        with rows.block(0):
            drawn.append((torch.rand(count, 1), torch.rand(1, 1), rows.drawn)[-1])
    rows.learn(*drawn, 2)
    with rows.block(0), pytest.raises(InputError, match=r"shape \(1, 1\).* number of samples is 1: .* last batch"):
        torch.rand(1, 1)


def test_digests_tell_shapes_apart():
    digests = []
    for shape in ((2, 3), (2, 4)):
        with (rows := rows_of(0, 2, 8)).block(0):
            torch.rand(shape)
        digests.append(rows.digest)
    with (rows := rows_of(2, 6, 8)).block(0):
        torch.rand(6, 3)
    assert digests[0] == rows.digest != digests[1]
