"""torch's own layers over a global batch: the same for any number of ranks, and on one what torch's own give."""

import numpy as np
import pytest
import torch

from flyte_ddp.engine.layers import dropout
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.share import Share
from tests.engine.layer_targets import CASES, KINDS


def launch(function, argument, ranks=1):
    world = World(size=ranks, local_size=ranks, backend="gloo", device="cpu")
    return launcher.launch(f"tests.engine.layer_targets:{function}", world, argument, 60, lambda event: None)


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


@pytest.mark.parametrize("name", [name for name in CASES if "batch norm" not in name])
def test_dropout_drops(computed, name):
    build, shape = CASES[name]
    torch.manual_seed(0)  # as compute has it
    model = build().eval()
    undisturbed = model(torch.randn(2, 10, *shape)[0]).detach().numpy()
    assert not np.allclose(computed[10, 1][0][name].outputs, undisturbed, atol=1e-3)


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


def test_dropout_of_everything_is_torchs():
    features = torch.ones(3, 2, requires_grad=True)
    dropped = dropout(features, 1.0, (2,), Share(first=0, count=3, size=3))
    dropped.sum().backward()
    assert not dropped.any()
    assert features.grad is not None
    assert not features.grad.any()


def test_samples_that_are_not_in_the_first_dimension_are_refused():
    with pytest.raises(ValueError, match=r"first dimension has to be the 3 samples.* got \(7, 2\): use batch_first"):
        dropout(torch.ones(7, 2), 0.5, (2,), Share(first=0, count=3, size=6))
