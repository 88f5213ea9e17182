"""Training loops for virtual ranks, whose gradients loop.backward computes, and with their mistakes."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from flyte_ddp import Loop
from tests.engine.own_loops import Drawn, evaluate, few, kept, linear, network


def train(loop: Loop, mistake=""):
    """As train, for virtual ranks; also draws by Python's and NumPy's generators in a step."""
    model = loop.wrap(
        {"changes a buffer": Counting, "replaces a buffer": Replacing}.get(mistake, lambda: network(0.3))()
    )
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(9))
    optimizer, schedule, average = kept(loop, model, batches)

    def loss_of(batch):
        inputs, labels = batch
        loss = F.cross_entropy(model(inputs + 0.1 * random.random() * np.random.rand()), labels)
        return loss.detach() if mistake == "returns no loss" else loss

    for _ in loop.epochs(headline="accuracy", percent=("accuracy",)):
        model.train()
        for batch in batches:
            if mistake == "calls the network":
                inputs, labels = batch.shares[0].tree
                F.cross_entropy(model(inputs), labels).backward()
            if mistake == "unpacks":
                inputs, labels = batch
            loss = loop.backward(batch, loss_of)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss=loss, scale=1.0)
            schedule.step()
            average.update(model)
        evaluate(loop, model, tests)


def adds_up_two(loop: Loop):
    """The gradients of two batches; they are those of both losses."""
    model, batches, tests, optimizer = linear(loop)
    for epoch in loop.epochs():
        for batch in batches:
            loss = loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]) / 2)
            if (epoch * len(batches) + loop.step) % 2:
                optimizer.step()
                optimizer.zero_grad()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def has_two_losses(loop: Loop):
    """Steps by a loss, then by one that is 2^40 times as small, as those of a GAN may be."""
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for batch in batches:
            for scale in (1.0, 2.0**-40):
                optimizer.zero_grad()
                loss = loop.backward(batch, lambda part, scale=scale: scale * F.cross_entropy(model(part[0]), part[1]))
                for weight in model.parameters():
                    weight.grad /= scale
                optimizer.step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def trains_in_bfloat16(loop: Loop):
    loop.wrap(nn.Linear(8, 3).bfloat16())


def freezes_later(loop: Loop):
    model, batches, _, _ = linear(loop)
    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            model.module.bias.requires_grad_(False)
            loop.log(loss=0.0)


class Counting(nn.Module):
    mean_input: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 3), 0
        self.register_buffer("mean_input", torch.zeros(8))

    def forward(self, inputs):
        self.calls += self.training
        if self.calls == 3:  # not in the first step
            with torch.no_grad():
                self.change(inputs.mean(0))
        return self.layer(inputs)

    def change(self, mean):
        self.mean_input.lerp_(mean, 0.1)


class Replacing(Counting):
    def change(self, mean):
        self.mean_input = self.mean_input.lerp(mean, 0.1)


def wraps_twice(loop: Loop):
    loop.wrap(nn.Linear(8, 3))
    loop.wrap(nn.Linear(8, 3))


def accumulates(loop: Loop):
    loop.wrap(nn.Linear(8, 3)).no_sync()


def changes_a_buffer(loop: Loop):
    train(loop, "changes a buffer")


def replaces_a_buffer(loop: Loop):
    train(loop, "replaces a buffer")


def calls_the_network(loop: Loop):
    train(loop, "calls the network")


def unpacks(loop: Loop):
    train(loop, "unpacks")


def returns_no_loss(loop: Loop):
    train(loop, "returns no loss")


def plain(loop: Loop):
    """As plain."""
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for batch in batches:
            optimizer.zero_grad()
            loss = loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            optimizer.step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)
