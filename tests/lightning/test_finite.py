"""Losses and trained weights that are not finite end a training under Lightning; other measures may be NaN."""

import math

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import distributed, nn

from flyte_ddp.errors import NonFiniteError
from flyte_ddp.lightning.finite import check_finite


@pytest.mark.parametrize(
    ("weight", "trained", "validation", "words"),
    [
        ("bias", {}, {}, "a weight is not finite in epoch 2, step 3, on rank 0"),
        ("", {"loss": math.inf}, {}, "loss is not finite in epoch 2, step 3, on rank 0"),
        ("", {}, {"loss/dataloader_idx_1": math.nan}, "the loss on the validation split is nan after epoch 2"),
        ("weight", {"loss": 1.0, "score": math.nan}, {"loss_ratio": math.nan}, ""),  # a weight that is not trained
    ],
)
def test_what_is_not_finite_is_named(tmp_path, weight, trained, validation, words):
    module = BoringModel()
    module.layer.weight.requires_grad_(False)
    if weight:
        nn.init.constant_(getattr(module.layer, weight), math.nan)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if words:
            with pytest.raises(NonFiniteError, match=words):
                check_finite(module, trained, validation, 1, 3)
        else:
            check_finite(module, trained, validation, 1, 3)
    finally:
        distributed.destroy_process_group()
