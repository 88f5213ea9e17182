"""The autoencoder's validation split of real images."""

import numpy as np
import pytest

from flyte_ddp.data.held_out import held_out, held_out_count
from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.errors import InputError


def test_classes_are_held_out_in_proportion_and_always_the_same_images():
    labels = open_split(prepare("digits"), "train")[1]
    chosen = held_out(labels)
    assert (chosen.sum(), held_out_count(len(labels)), held_out_count(60_000)) == (125, 125, 5_000)
    shares = np.bincount(labels[chosen], minlength=10) * len(labels) / 125
    np.testing.assert_allclose(shares, np.bincount(labels), atol=len(labels) / 125)
    assert (held_out(labels) == chosen).all()


@pytest.mark.parametrize("fraction", [0, 1, -1, 1e-4])
def test_a_split_without_images_is_refused(fraction):
    with pytest.raises(InputError, match=f"fraction must leave an image on either side of 1501, got {fraction:g}"):
        held_out_count(1501, fraction)
