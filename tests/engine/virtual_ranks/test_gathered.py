"""Losses that compare samples, by all_gather(), have the same bits by virtual ranks on any number of ranks."""

import pytest
import torch
from torch.nn import functional as F

from flyte_ddp.errors import InputError
from tests.engine.test_plain_ranks import Drawing
from tests.small_training import Unplugged, identical, relative_difference, unplug_at

# 106 images, 35 a step: in the last step one of three parts has a sample, the others have none
SHORT = {"batch_size": 35, "train_fraction": 106 / 318, "epochs": 2, "log_interval": 1}


class Compared(Drawing):
    """Pulls the scores of images of a class together; its measure draws, too."""

    def measure(self, outputs, batch):
        rows = F.normalize(outputs + 0.1 * torch.rand_like(outputs), dim=1)
        labels = batch[1]
        everyones = self.all_gather(torch.cat([rows, labels[:, None].float()], 1))
        others, their_labels = everyones[:, :-1], everyones[:, -1].long()
        scores = rows @ others.T - 0.1 * torch.rand(())
        is_same = (labels[:, None] == their_labels).float()
        loss = F.binary_cross_entropy_with_logits(scores, is_same, reduction="none").mean(1)
        return {**super().measure(outputs, batch), "loss": loss}


class Twice(Compared):
    def measure(self, outputs, batch):
        measured = super().measure(outputs, batch)
        return {**measured, "mean": measured["loss"] - self.all_gather(measured["loss"]).mean()}


class Within(Drawing):
    """Gathers in forward, before the outputs of other parts are known."""

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        return outputs - self.all_gather(outputs).mean(0)


def named(recipe):
    return f"{__name__}:{recipe}"


@pytest.fixture(scope="module")
def one_rank(whole):
    return whole(1, recipe=named("Compared"), virtual_ranks=3, **SHORT)


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_bytes_on_any_number_of_ranks(train, one_rank, nproc):
    assert identical(one_rank, train(nproc, recipe=named("Compared"), virtual_ranks=3, **SHORT))


def test_killed_on_three_ranks_it_ends_with_the_same_bits_on_two(train, one_rank):
    settings = {"recipe": named("Compared"), "virtual_ranks": 3, "checkpoint_seconds": 0, **SHORT}
    with pytest.raises(Unplugged):
        train(3, on_event=unplug_at(3), **settings)
    assert identical(one_rank, train(2, **settings))


def test_as_many_ranks_compute_the_same_up_to_rounding(train):
    settings = {"recipe": named("Compared"), "batch_size": 33, "train_fraction": 66 / 318}
    plain, exact = train(2, name="plain", **settings), train(1, name="exact", virtual_ranks=2, **settings)
    assert relative_difference(plain, exact) < 1e-4


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("Twice", r"with virtual_ranks all_gather\(\) must be called once: gather one tensor of both"),
        ("Within", r"Within.forward .*with virtual_ranks all_gather\(\) must be called in measure\(\)"),
    ],
)
def test_what_cannot_be_gathered_by_part_is_refused_in_the_first_step(train, recipe, words):
    with pytest.raises(InputError, match=words):
        train(2, recipe=named(recipe), virtual_ranks=2, **SHORT)
