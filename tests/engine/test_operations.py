"""A training step has no more operations than it had, each of which a GPU has to be given, and waits for none."""

import pytest

COUNT = "benchmarks.gpu_rows.steps:count_operations"
# Each has the host wait for the device: the last two copy a number of the host's to it
WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "scalar_tensor", "lift_fresh")


@pytest.mark.parametrize(
    ("settings", "ranks", "most"),
    [
        ({"model": "mnist_cnn"}, 1, 90),
        ({"model": "mnist_cnn", "precision": "bfloat16"}, 2, 109),
        ({"model": "resnet9_small", "ema_decay": 0.9, "flip": True, "shift_pixels": 2}, 1, 181),
        ({"model": "resnet9_small", "ema_decay": 0.9, "flip": True, "shift_pixels": 2}, 2, 405),
    ],
)
def test_a_step_has_few_operations_and_none_that_waits(train, settings, ranks, most):
    for count, names in train(ranks, target=COUNT, label_smoothing=0.1, train_fraction=0.5, **settings):
        assert count <= most
        assert sorted({f"aten::{name}" for name in WAITS} & set(names)) == []
