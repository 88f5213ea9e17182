"""The seeds of steps: in them each rank draws its own numbers, and outside of them all ranks draw the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flyte_ddp.lightning.seeds import StepSeeds


@pytest.mark.parametrize(
    ("hook", "step", "is_own"),
    [
        ("on_train_epoch_start", (), False),
        ("on_train_batch_start", (None, 0), True),
        ("on_train_batch_end", (None, None, 0), False),
        ("on_validation_batch_start", (None, 0), True),
        ("on_validation_batch_end", (None, None, 0), False),
        ("on_test_batch_start", (None, 0, 0), True),
        ("on_test_batch_end", (None, None, 0, 0), False),
    ],
)
def test_ranks_draw_numbers_of_their_own_in_steps_alone(hook, step, is_own):
    def draw(rank, epoch):
        trainer: Any = SimpleNamespace(current_epoch=epoch, num_training_batches=3)
        observer: Any = None  # which no hook needs
        torch.manual_seed(rank)
        getattr(StepSeeds(0, rank, observer), hook)(trainer, None, *step)
        return float(torch.rand(()))

    assert (draw(0, 0) != draw(1, 0)) is is_own
    assert draw(0, 0) == draw(0, 0) != draw(0, 1)
