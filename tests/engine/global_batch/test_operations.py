"""A training step has no more operations than it had, each of which a GPU has to be given, and waits for none."""

import pytest

COUNT = "benchmarks.gpu_rows.steps:count_operations"
# Each has the host wait for the device: the last two copy a number of the host's to it
WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "scalar_tensor", "lift_fresh")


@pytest.mark.parametrize(
    ("settings", "ranks", "most"),
    [
        ({"model": "mnist_cnn"}, 1, 83),
        ({"model": "mnist_cnn", "precision": "bfloat16"}, 2, 109),
        ({"model": "resnet9_small", "ema_decay": 0.9, "flip": True, "shift_pixels": 2}, 1, 174),
        ({"model": "resnet9_small", "ema_decay": 0.9, "flip": True, "shift_pixels": 2}, 2, 405),
        ({"model": "resnet9_small", "ghost_batch_size": 4}, 2, 258),
    ],
)
def test_a_step_has_few_operations_and_none_that_waits(train, settings, ranks, most):
    # 160 images: the last batch isn't short, or it would be the first of its size
    for count, each in train(ranks, target=COUNT, label_smoothing=0.1, train_fraction=160 / 318, **settings):
        assert count <= most
        assert sorted({f"aten::{name}" for name in WAITS} & set(each)) == []


def test_batch_norm_by_groups_needs_no_collective(train):
    def collectives(**recipe):
        ((_, each), _) = train(model="fashion_cnn", target=COUNT, train_fraction=160 / 318, **recipe)
        return sum(count for name, count in each.items() if name.startswith("c10d"))

    buckets = 2  # of DDP's, for gradients and sums
    assert collectives(name="whole") == buckets + 2 * 2  # of each layer, forward and backward
    assert collectives(ghost_batch_size=4) == buckets
