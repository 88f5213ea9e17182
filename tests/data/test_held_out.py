"""A validation split of real images: what goes where, and that the test images go nowhere."""

import os

import numpy as np
import pytest

from flyte_ddp.data.datasets import prepare
from flyte_ddp.data.held_out import hold_out
from flyte_ddp.data.prepared import open_split, read_description, verify
from flyte_ddp.errors import InputError


def rows(images, labels):
    return sorted(image.tobytes() + bytes([label]) for image, label in zip(images, labels, strict=True))


def test_the_training_images_are_shared_out_and_the_test_images_left_out(tmp_path):
    digits = prepare("digits")
    given = hold_out(digits, tmp_path / "held out")
    assert given == verify(tmp_path / "held out")
    assert (given.name, given.train_samples, given.test_samples) == ("digits-held-out", 1376, 125)
    assert (given.classes, given.passes_per_epoch) == (read_description(digits).classes, 8)
    train, held_out = (open_split(tmp_path / "held out", split) for split in ("train", "test"))
    original = open_split(digits, "train")
    assert sorted(rows(*train) + rows(*held_out)) == rows(*original)
    shares = np.bincount(held_out[1], minlength=10) * len(original[1]) / len(held_out[1])
    np.testing.assert_allclose(shares, np.bincount(original[1]), atol=len(original[1]) / len(held_out[1]))
    assert hold_out(digits, tmp_path / "again").digest == given.digest


def test_mnist_is_shared_out_as_its_users_expect(tmp_path, test_data, monkeypatch):
    monkeypatch.setenv("DDP_DATA_MIRROR", test_data.as_uri())
    given = hold_out(prepare("mnist"), tmp_path / "held out")
    assert (given.train_samples, given.test_samples) == (55_000, 5_000)


@pytest.mark.parametrize("share", [0, 1, -1, 1e-4])
def test_a_split_without_images_is_refused(share, tmp_path):
    with pytest.raises(InputError, match=f"share must leave an image on either side of 1501, got {share:g}"):
        hold_out(prepare("digits"), tmp_path / "held out", share)
    assert os.listdir(tmp_path) == []
