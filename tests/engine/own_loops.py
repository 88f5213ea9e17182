"""Training loops as people write them."""

import random
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from flyte_ddp import Blocks, Loop
from tests.engine.optimizer_recipes import Outer

SAMPLES = 90


class Drawn(Dataset):
    """Its samples are augmented in __getitem__, by the usual generators."""

    def __init__(self, is_noisy=True):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(SAMPLES) % 3
        self.features = torch.randn(SAMPLES, 8, generator=generator) + self.labels[:, None]
        self.is_noisy = is_noisy

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.randn(8) * random.random() * np.random.rand() if self.is_noisy else 0
        return self.features[index] + noise, self.labels[index]


class Average:
    """An exponential moving average, as people write it: no nn.Module, and a number beside its tensors."""

    def __init__(self, model):
        self.weights, self.steps = [weight.detach().clone() for weight in model.parameters()], 0

    def update(self, model):
        self.steps += 1
        for mean, weight in zip(self.weights, model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.1)

    def state_dict(self):
        return {"weights": self.weights, "steps": self.steps}

    def load_state_dict(self, state):
        self.weights, self.steps = list(state["weights"]), state["steps"]


def network(dropout):
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def kept(loop, model, batches):
    """All that changes beside the network."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, loop.settings.epochs * len(batches))
    average = Average(model)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule, average=average)
    return optimizer, schedule, average


def train(loop: Loop, dropout=0.3, test=9):
    """All that may go wrong in a resume: dropout, batch norm, a schedule, an average, accumulated gradients."""
    model = loop.wrap(network(dropout))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(test))
    optimizer, schedule, average = kept(loop, model, batches)
    for _ in loop.epochs(headline="accuracy", percent=("accuracy",)):
        model.train()
        for inputs, labels in batches:
            half = len(labels) // 2
            with model.no_sync():
                (F.cross_entropy(model(inputs[:half]), labels[:half]) / 2).backward()
            loss = F.cross_entropy(model(inputs[half:]), labels[half:])
            (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss=loss, scale=1.0)
            schedule.step()  # after the log: a checkpoint has to have it
            average.update(model)
        evaluate(loop, model, tests)


def few(count):
    data = Drawn(is_noisy=False)
    return data.features[:count], data.labels[:count]


def evaluate(loop, model, tests):
    """With gradients, which nobody needs, and in the mode of training: as it is written now and then."""
    loss, right, count = 0.0, 0, 0
    model.eval()
    for inputs, labels in tests:
        outputs = model(inputs)
        loss, right = (
            loss + float(F.cross_entropy(outputs, labels, reduction="sum")),
            right + (outputs.argmax(1) == labels).sum(),
        )
        count += len(labels)
    measured = loop.evaluated(accuracy=(right, count), loss=(loss, count))
    assert measured.keys() == {"accuracy", "loss"}


def linear(loop, test=9, is_kept=True):
    """A network without what depends on the number of ranks, with its batches, evaluation and optimizer."""
    torch.manual_seed(0)
    model = loop.wrap(nn.Linear(8, 3))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(test))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_kept:
        loop.keep(model=model, optimizer=optimizer)
    return model, batches, tests, optimizer


def step(loop, model, optimizer, inputs, labels):
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loop.log(loss=loss)


def plain(loop: Loop, steps=None, forgets=(), bad_step=None):
    model, batches, tests, optimizer = linear(loop, is_kept="keep" not in forgets)
    if "epochs" in forgets:
        return next(iter(batches))
    for epoch in loop.epochs():
        for step, (inputs, labels) in enumerate(batches, loop.step):
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == bad_step and loop.rank == loop.world_size - 1:
                loss = loss * float("nan")
            if "log" not in forgets:
                loop.log(**({"loss": loss} if "loss" not in forgets else {"error": loss}))
            if steps and step + 1 == steps:
                break
        if "evaluated" not in forgets:
            evaluate(loop, model, tests)
        if steps and epoch == 1:
            break


def accumulates(loop: Loop, every=3):
    """The gradients of three steps; seven steps an epoch, of which the last one's waits for the next epoch's."""
    torch.manual_seed(0)
    model = loop.wrap(network(0.3))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(9))
    optimizer, schedule, average = kept(loop, model, batches)
    for epoch in loop.epochs(headline="accuracy", percent=("accuracy",)):
        model.train()
        for inputs, labels in batches:
            is_last = (epoch * len(batches) + loop.step) % every == every - 1
            with nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(inputs), labels)
                (loss / every).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                average.update(model)
            loop.log(loss=loss, scale=1.0)
            schedule.step()
        evaluate(loop, model, tests)


def trains_layers_at_their_own_pace(loop: Loop):
    """One optimizer steps each time, the other every three steps; draws before an epoch's steps."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Linear(8, 3)
    model = loop.wrap(nn.Sequential(*layers))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(9))
    fast, slow = (torch.optim.Adam(layer.parameters(), 0.01) for layer in layers)
    loop.keep(model=model, fast=fast, slow=slow, copy=AveragedModel(model))
    for epoch in loop.epochs():
        scale = 1 + random.random() * np.random.rand()
        for inputs, labels in batches:
            loss = F.cross_entropy(model(scale * inputs), labels)
            loss.backward()
            fast.step()
            fast.zero_grad()
            if (epoch * len(batches) + loop.step) % 3 == 2:
                slow.step()
                slow.zero_grad()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def changes_what_it_trains(loop: Loop):
    """Unfreezes a layer in the second epoch, for which its optimizer gets a group, and lowers the rates of each epoch.

    Each step begins with the gradients of the one before, and an epoch is evaluated in its middle.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    layers[0].requires_grad_(False)
    model = loop.wrap(layers)
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(9))
    optimizer = torch.optim.SGD(layers[1].parameters(), 0.1, momentum=0.9)
    loop.keep(model=model, optimizer=optimizer)
    for epoch in loop.epochs():
        if epoch == 1:
            layers[0].requires_grad_(True)
            optimizer.add_param_group({"params": layers[0].parameters(), "lr": 0.01})
        groups = optimizer.param_groups
        for group in groups:
            group["lr"] *= 0.9
        for inputs, labels in batches:
            groups[0]["lr"] *= 0.99
            optimizer.step()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            loop.log(loss=loss)
            if loop.step == 2:
                evaluate(loop, model, tests)


def holds_an_optimizer_that_is_kept(loop: Loop):
    """Killed and resumed, it shares its rates with the one that it holds."""
    model, batches, tests, _ = linear(loop, is_kept=False)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    outer = Outer(inner)
    schedule = torch.optim.lr_scheduler.ExponentialLR(outer, 0.9)
    loop.keep(model=model, outer=outer, inner=inner, schedule=schedule)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, outer, inputs, labels)
            schedule.step()
        evaluate(loop, model, tests)


def leaves_the_steps_and_evaluates(loop: Loop):
    """With gradients, and batch norm; one rank has nothing to evaluate."""
    model = loop.wrap(network(0.0))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(1))
    optimizer, _, _ = kept(loop, model, batches)
    for _ in loop.epochs():
        model.train()
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            if loop.step == 2:
                break
        evaluate(loop, model, tests)


def learns_from_what_it_predicts(loop: Loop):
    """In each step the network first predicts in evaluation mode, by its running statistics."""
    torch.manual_seed(0)
    model = loop.wrap(network(0.0))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            model.eval()
            with torch.no_grad():
                predicted = model(inputs).softmax(1)
            model.train()
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, labels) + F.cross_entropy(outputs, predicted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


class Caching(nn.Linear):
    """Has a table of positions, which grows with what a rank sees, and is in no checkpoint."""

    table: torch.Tensor

    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        length = int(inputs.abs().max() * 100)
        if length > len(self.table):
            self.table = torch.arange(float(length))
        return super().forward(inputs + self.table[1])


def grows_a_cache(loop: Loop):
    model, batches, tests = loop.wrap(Caching()), loop.batches(Drawn()), loop.evaluation(few(9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        evaluate(loop, model, tests)


def steps_by_hand(loop: Loop):
    """Without an optimizer of torch's."""
    model, batches, tests, _ = linear(loop, is_kept=False)
    loop.keep(model=model)
    for _ in loop.epochs():
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    assert weight.grad is not None
                    weight -= 0.1 * weight.grad
                    weight.grad = None
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def trains_two(loop: Loop):
    """As a GAN: what one network has made is used for the steps of both."""
    maker, judge = loop.wrap(nn.Linear(8, 8)), loop.wrap(nn.Linear(8, 1))
    batches = loop.batches(Drawn())
    of_maker, of_judge = (torch.optim.Adam(one.parameters(), 0.01) for one in (maker, judge))
    loop.keep(model=maker, judge=judge, of_maker=of_maker, of_judge=of_judge)
    for _ in loop.epochs():
        for inputs, _ in batches:
            made = maker(torch.randn_like(inputs))
            loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(inputs)).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            of_maker.zero_grad()
            F.softplus(-judge.module(made)).mean().backward()
            of_maker.step()
            loop.log(loss=loss)
        loop.evaluated(loss=float(loop.step))


def evaluates_within(loop: Loop):
    """Every three steps, in the middle of a step; and leaves the steps, and comes back to them."""
    model, batches, tests, optimizer = linear(loop)
    loop.batches(few(24))  # nobody iterates over these
    for _ in loop.epochs():
        for count in (2, len(batches)):
            for _, (inputs, labels) in zip(range(count), batches, strict=False):
                losses = F.cross_entropy(model(inputs), labels, reduction="none")
                loop.log(loss=losses)
                if loop.step % 3 == 2:
                    evaluate(loop, model, tests)
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
        evaluate(loop, model, tests)


def compiles(loop: Loop):
    torch.manual_seed(0)
    model = loop.wrap(torch.compile(nn.Linear(8, 3), backend="eager"))  # type: ignore[arg-type]
    batches = loop.batches(Drawn())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        loop.evaluated(loss=0.5)


def leaves_after_the_fifth_step(loop: Loop):
    """By the number of the step, which a step too many would pass."""
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            if loop.step == 4:
                break
        evaluate(loop, model, tests)


def leaves_each_epoch_early_and_takes_the_best(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs(headline="accuracy", best="highest"):
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            if loop.step == 2:
                break
        evaluate(loop, model, tests)


def left_early(loop: Loop):
    plain(loop, steps=3)


def left_before_the_first_step(loop: Loop):
    model = loop.wrap(nn.Linear(8, 3))
    loop.batches(Drawn())
    loop.keep(model=model)
    for _ in loop.epochs():
        loop.evaluated(loss=1.0)


def trains_beside_an_evaluation(loop: Loop):
    """Whose batches are unlabelled data, say: the ranks still train together."""
    model, batches, tests, optimizer = linear(loop, 90)
    for _ in loop.epochs():
        unlabelled = iter(tests)
        next(unlabelled)
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        evaluate(loop, model, loop.evaluation(few(9)))


def evaluates_two_folders_of_blocks(loop: Loop):
    """At once, and one of them with other samples than the others."""
    model, batches, _, optimizer = linear(loop)
    ones, twos, more = (Blocks([5] * 6, read) for read in (_rows(1.0, 8), _rows(2.0, 8), _rows(3.0, 4)))
    first, second, third = loop.evaluation(ones), loop.evaluation(twos), loop.evaluation(more)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        pairs = [(float(one.mean()), float(two.mean())) for one, two in zip(first, second, strict=True)]
        loop.evaluated(loss=1.0, right=float({*pairs} == {(1.0, 2.0)} and {row.shape[1] for row in third} == {4}))


def _rows(value, width):
    return lambda number: np.full((5, width), value, np.float32)


def tests_one_sample(loop: Loop):
    train(loop, test=1)


def gets_worse_after_two_epochs(loop: Loop):
    model = loop.wrap(nn.Linear(8, 3))
    batches = loop.batches(Drawn(is_noisy=False))
    validation, test = loop.evaluation(few(90)), loop.evaluation(few(90))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for epoch in loop.epochs(headline="accuracy", best="highest"):
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            (loss if epoch < 2 else -10 * loss).backward()
            optimizer.step()
            loop.log(loss=loss)
        for inputs, labels in validation:
            loop.measured(accuracy=model(inputs).argmax(1) == labels)
        loop.evaluated()
    for inputs, labels in test:
        loop.measured(accuracy=model(inputs).argmax(1) == labels)
    loop.evaluated()


def tests_once_at_the_end(loop: Loop):
    model = loop.wrap(nn.Linear(8, 3))
    batches, test = loop.batches(Drawn()), loop.evaluation(few(90))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)

    def measure():
        for inputs, labels in test:
            loop.measured(loss=F.cross_entropy(model(inputs), labels, reduction="none"))
        return loop.evaluated()

    for _ in loop.epochs():
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)
        measured = measure()
    assert measure() == measured
