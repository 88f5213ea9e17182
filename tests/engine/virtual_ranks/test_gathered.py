"""Losses that compare samples, by all_gather(), have the same bits by virtual ranks on any number of ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import RankError
from tests.engine.test_plain_ranks import Drawing
from tests.small_training import Unplugged, first_and_slow, identical, relative_difference, unplug_at

# With smoothed labels an image classifier has an objective, which is trained in place of the loss
PLAIN = {"label_smoothing": 0.0, "log_interval": 1}
# 106 images, 35 a step: in the last step one of three parts has a sample, the others have none
SHORT = {"batch_size": 35, "train_fraction": 106 / 318, "epochs": 2, **PLAIN}
EVEN = {"batch_size": 33, "train_fraction": 198 / 318, **PLAIN}


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


class Centred(nn.Module):
    """Takes away a running mean."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, features):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        return features - self.mean


class Raw(Compared):
    """Does not normalise its rows, so that their sizes have gradients; changes outputs in place, and a buffer."""

    def model(self):
        return nn.Sequential(*super().model(), Centred())

    def measure(self, outputs, batch):
        outputs *= 0.5
        gap = torch.cdist(outputs, self.all_gather(outputs)).square().mean(1)
        return {**Drawing.measure(self, outputs, batch), "loss": (1 - gap).relu() + gap * 1e-2}


class Spectra(Compared):
    """Gathers complex rows."""

    def measure(self, outputs, batch):
        spectra = torch.fft.rfft(outputs)
        gap = (spectra[:, None] - self.all_gather(spectra)[None]).abs().square().mean((1, 2))
        return {**Drawing.measure(self, outputs, batch), "loss": (1 - gap).relu() + gap * 1e-2}


class Slopes(Compared):
    """Takes gradients of its outputs."""

    def measure(self, outputs, batch):
        others = self.all_gather(outputs.detach())
        if not outputs.requires_grad:
            return {**Drawing.measure(self, outputs, batch), "loss": outputs.square().mean(1)}
        energy = (outputs @ others.T).tanh().mean()
        slopes = torch.autograd.grad(energy, outputs, create_graph=True)[0]
        return {**Drawing.measure(self, outputs, batch), "loss": slopes.square().sum(1) + outputs.square().mean(1)}


class Through(Compared):
    """Takes gradients of its outputs, of which a share comes by what other parts do with them."""

    def measure(self, outputs, batch):
        energy = (outputs @ self.all_gather(outputs).T).tanh().mean()
        slopes = torch.autograd.grad(energy, outputs)[0] if outputs.requires_grad else outputs
        return {**Drawing.measure(self, outputs, batch), "loss": outputs.square().mean(1) * slopes.norm(dim=1)}


class Labels(Compared):
    """Gathers what has no gradients."""

    def measure(self, outputs, batch):
        share = (self.all_gather(batch[1])[None] == batch[1][:, None]).float().mean(1)
        measured = Drawing.measure(self, outputs, batch)
        return {**measured, "loss": measured["loss"] * (1 + share)}


class Later(Compared):
    """Gathers from its second epoch on."""

    def augment(self, batch, random):
        self.epoch = random.epoch
        return batch

    def measure(self, outputs, batch):
        if getattr(self, "epoch", 0):
            return super().measure(outputs, batch)
        return {**Drawing.measure(self, outputs, batch), "mean": outputs.mean(1)}


class OneRow(Compared):
    def measure(self, outputs, batch):
        mean = self.all_gather(outputs.mean(0, keepdim=True))
        return {**Drawing.measure(self, outputs, batch), "loss": (outputs - mean.mean(0)).square().mean(1)}


class Twice(Compared):
    def measure(self, outputs, batch):
        measured = super().measure(outputs, batch)
        return {**measured, "mean": measured["loss"] - self.all_gather(measured["loss"]).mean()}


class Within(Drawing):
    """Gathers in forward, before the outputs of other parts are known."""

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        return outputs - self.all_gather(outputs).mean(0)


class Poisoned(Compared):
    """Has no finite loss in a global batch with the brightest image."""

    def measure(self, outputs, batch):
        brightness = batch[0].float().flatten(1).mean(1, keepdim=True)
        is_sound = (self.all_gather(brightness) < 160).all()
        measured: Any = Drawing.measure(self, outputs, batch)
        return {**measured, "loss": measured["loss"].where(is_sound, torch.nan)}


def named(recipe):
    return f"{__name__}:{recipe}"


@pytest.fixture(scope="module")
def one_rank(whole):
    return whole(1, recipe=named("Compared"), virtual_ranks=3, **SHORT)


def test_equal_bytes_on_any_number_of_ranks(train, one_rank):
    assert identical(one_rank, train(2, recipe=named("Compared"), virtual_ranks=3, **SHORT))


@pytest.mark.parametrize("recipe", first_and_slow("Raw", "Spectra", "Slopes", "Labels"))
def test_rows_of_any_kind_have_equal_bytes(train, recipe):
    settings = {"recipe": named(recipe), "virtual_ranks": 3, **SHORT}
    assert identical(*(train(nproc, name=f"{nproc}", **settings) for nproc in (1, 3)))


@pytest.mark.parametrize("recipe", first_and_slow("Spectra", "Compared", "Raw", "Slopes"))
def test_without_virtual_ranks_they_are_as_close_as_rounding(train, recipe):
    few = {"recipe": named(recipe), **EVEN}
    plain, exact = train(2, name="plain", **few), train(1, name="exact", virtual_ranks=2, **few)
    assert relative_difference(plain, exact) < 1e-4


def test_killed_on_three_ranks_it_ends_with_the_same_bits_on_two(train, one_rank):
    settings = {"recipe": named("Compared"), "virtual_ranks": 3, "checkpoint_seconds": 0, **SHORT}
    with pytest.raises(Unplugged):
        train(3, on_event=unplug_at(3), **settings)
    assert identical(one_rank, train(2, **settings))


def test_a_loss_that_is_not_finite_is_named_by_a_host_ahead_of_its_device(train):
    found = []
    for target in ("flyte_ddp.engine.worker:run", "tests.launch.targets:behind"):
        with pytest.raises(RankError, match="loss is not finite in epoch 1, step") as failed:
            train(
                2,
                recipe=named("Poisoned"),
                virtual_ranks=2,
                target=target,
                **{**SHORT, "seed": 5, "log_interval": 1000},
            )
        found.append(str(failed.value).splitlines()[0].partition("NonFiniteError")[2])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            "Twice",
            r"with virtual_ranks all_gather\(\) must be called once in measure\(\), got a second call: gather one",
        ),
        ("Later", r"with virtual_ranks all_gather\(\) must be called from the first step on, and in each"),
        ("Through", r"with virtual_ranks measure\(\) must not take gradients through all_gather\(\)"),
        ("OneRow", r"all_gather\(\) must be given a row for each of the \d+ samples, got shape \(1, 10\): repeat"),
        ("Within", r"Within.forward .*with virtual_ranks all_gather\(\) must be called in measure\(\)"),
    ],
)
def test_what_cannot_be_gathered_by_part_is_refused(train, recipe, words):
    with pytest.raises(InputError, match=words):
        train(2, recipe=named(recipe), virtual_ranks=2, **SHORT)
