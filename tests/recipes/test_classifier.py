"""What the network and the data of a Classifier must return; torch's own errors name neither."""

import re
from typing import Any

import pytest
import torch

from flyte_ddp.errors import InputError
from flyte_ddp.recipes.classifier import Classifier
from flyte_ddp.settings import TrainingSettings

LOGITS, LABELS = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])


class Flowers(Classifier):
    pass


def measured(outputs, labels, alone=False):
    recipe = Flowers(TrainingSettings())
    recipe.share.alone = alone
    return recipe.measure(outputs, (torch.zeros(4, 8), labels))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("outputs", "labels", "words"),
    [
        (LOGITS, LABELS + 1, "labels must be from 0 to 2, since the network returns 3 logits, got 3"),
        (LOGITS, LABELS - 1, "labels must be from 0 to 2, since the network returns 3 logits, got -1"),
        (LOGITS, LABELS.float(), "labels must be int64 of shape (4,), got float32 of shape (4,)"),
        (LOGITS, LABELS.int(), "labels must be int64 of shape (4,), got int32 of shape (4,)"),
        (
            LOGITS,
            LABELS[:, None],
            (
                "labels must be int64 of shape (4,), got int64 of shape (4, 1): return the number of each sample's "
                "class, as .long() gives it, or .argmax(1) of several columns, or [:, 0] of one"
            ),
        ),
        ((LOGITS, 1), LABELS, "forward must return logits, a tensor of shape (n, classes), got tuple"),
        (LOGITS[:, 0], LABELS, "forward must return logits, a tensor of shape (n, classes), got shape (4,)"),
    ],
)
def test_what_is_no_classification_is_refused_by_name(outputs, labels, words, alone):
    with pytest.raises(InputError, match=re.escape(f"Flowers: {words}")):
        measured(outputs, labels, alone)


def test_labels_may_be_bytes():
    assert measured(LOGITS, LABELS.to(torch.uint8))["loss"].shape == (4,)


@pytest.mark.parametrize("alone", [True, False])
def test_a_label_that_torch_would_leave_out_is_refused(alone):
    labels = torch.where(LABELS == 0, -100, LABELS)
    with pytest.raises(InputError, match="got -100: leave samples without a label out of the data"):
        measured(LOGITS, labels, alone)


def test_predictions_of_other_outputs_ask_for_a_method_of_their_own():
    words = "Flowers: forward must return logits, a tensor of shape (n, classes), got dict: for other outputs, define "
    predict: Any = Flowers(TrainingSettings()).predictions
    with pytest.raises(InputError, match=re.escape(words)):
        predict({"logits": LOGITS}, (torch.zeros(4, 8), LABELS))
