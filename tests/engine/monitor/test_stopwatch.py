"""What the benchmarks measure is the engine: a training with the stopwatch in it ends with the same bits."""

import pytest
import torch


@pytest.mark.slow
def test_a_measured_training_ends_with_the_bits_of_the_plain_one(train, tmp_path):
    plain = train(ema_decay=0.9, shift_pixels=1, epochs=2)
    for target in ("count_cost", "compare_with_fixed_batch"):
        measured = train(ema_decay=0.9, shift_pixels=1, epochs=2, name=target, target=f"benchmarks.stopwatch:{target}")
        assert len(measured) == 2
        assert all(figure > 0 for of_rank in measured for figure in of_rank)
        weights = torch.load(tmp_path / target / "model.pt", weights_only=True)
        assert all(torch.equal(weight, plain.weights[name]) for name, weight in weights.items()), target
