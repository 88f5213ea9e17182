"""Training loops for virtual ranks, whose gradients loop.backward computes, and with their mistakes."""

import random
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flyte_ddp import Loop
from tests.engine.own_loops import Drawn, evaluate, few, kept, linear, network


def train(loop: Loop, mistake=""):
    """As train, for virtual ranks; also draws by Python's and NumPy's generators in a step."""
    model = loop.wrap(network(0.3))
    batches, tests = loop.batches(Drawn()), loop.evaluation(few(9))
    optimizer, schedule, average = kept(loop, model, batches)
    if mistake == "scales a gradient":
        next(model.parameters()).register_hook(lambda gradient: 1.01 * gradient)

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


class Players(nn.Module):
    """Two networks, of which each call uses one."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, name, inputs):
        return getattr(self, name)(inputs)


def trains_players_by_turns(loop: Loop):
    """As a GAN with a penalty of gradients, which are differentiated themselves."""
    players = Players()
    model = loop.wrap(players, find_unused_parameters=True)
    batches = loop.batches(Drawn())
    of_maker, of_judge = (torch.optim.SGD(one.parameters(), 0.05) for one in (players.maker, players.judge))
    loop.keep(model=model, of_maker=of_maker, of_judge=of_judge)

    def judges(batch):
        made = model("maker", torch.randn_like(batch[0])).detach().requires_grad_()
        found = model("judge", made)
        (slopes,) = torch.autograd.grad(found.sum(), made, create_graph=True)
        return F.softplus(found).mean() + F.softplus(-model("judge", batch[0])).mean() + slopes.square().mean()

    def makes(batch):
        return F.softplus(-model("judge", model("maker", torch.randn_like(batch[0])))).mean()

    for _ in loop.epochs():
        for batch in batches:
            for optimizer, loss_of in ((of_judge, judges), (of_maker, makes)):
                optimizer.zero_grad()
                loss = loop.backward(batch, loss_of)
                optimizer.step()
            loop.log(loss=loss)
        loop.evaluated(loss=float(loop.step))


def scales_a_gradient(loop: Loop):
    train(loop, "scales a gradient")


def flips_a_bit(loop: Loop):
    """From the fourth step on, rank 1 has a wrong bit in a gradient the first time that it computes it in a step."""
    model, batches, tests, optimizer = linear(loop)
    weight, flipped = next(model.parameters()), set()

    def flip(weight):
        step = loop.epoch * len(batches) + loop.step
        if loop.rank == 1 and step >= 3 and step not in flipped:
            flipped.add(step)
            weight.grad.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)

    weight.register_post_accumulate_grad_hook(flip)
    for _ in loop.epochs():
        for batch in batches:
            loss = loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def synchronises_batch_norm(loop: Loop):
    loop.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(network(0.0)))


def takes_turns(loop: Loop):
    """Trains on few samples, then on more."""
    model = loop.wrap(nn.Linear(8, 3))
    data = [loop.batches(few(12)), loop.batches(few(48))]
    tests, optimizer = loop.evaluation(few(9)), torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for epoch in loop.epochs():
        for batch in data[epoch % 2]:
            loss = loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def draws_by_itself(loop: Loop):
    """Draws from a generator of its own."""
    model, batches, *_ = linear(loop)
    generator = torch.Generator()

    def loss_of(part):
        return torch.rand((), generator=generator) * F.cross_entropy(model(part[0]), part[1])

    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, loss_of)


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

    def loss_of(scale, part):
        return scale * F.cross_entropy(model(part[0]), part[1])

    for _ in loop.epochs():
        for batch in batches:
            for scale in (1.0, 2.0**-40):
                before = next(model.parameters()).grad
                copied = before.clone() if before is not None else None
                optimizer.zero_grad()
                loss = loop.backward(batch, partial(loss_of, scale))
                assert copied is None or torch.equal(before, copied), "a gradient that is kept was changed"
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


class Teaching(nn.Module):
    """Moves a teacher's weight in its forward pass."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

    def forward(self, inputs):
        self.teacher.weight.data = 0.9 * self.teacher.weight.data + 0.1 * self.student.weight.data
        return self.student(inputs) + self.teacher(inputs)


def moves_a_teacher(loop: Loop):
    model, batches = loop.wrap(Teaching()), loop.batches(few(42))
    loop.keep(model=model)
    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))


class Counting(nn.Module):
    """Has buffers that go by the samples: one changes in place, one is replaced, one counts, one grows."""

    mean_input: torch.Tensor
    last_input: torch.Tensor
    positive: torch.Tensor
    seen: torch.Tensor
    is_saved = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("mean_input", torch.zeros(8))
        self.register_buffer("last_input", torch.zeros(8))
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(1, 8), persistent=self.is_saved)

    def forward(self, inputs):
        outputs = self.layer(inputs + self.mean_input - self.last_input + self.seen[0])
        if self.training:
            with torch.no_grad():
                self.mean_input.lerp_(inputs.mean(0), 0.1)
                self.last_input = self.last_input.lerp(inputs[-1], 0.1)
                self.positive += (inputs > 0).sum()
                self.seen = torch.cat([self.seen, inputs])
        return outputs


class Growing(Counting):
    is_saved = True


def grows(loop: Loop):
    counts(loop, Growing())


def counts(loop: Loop, network=None):
    """Has buffers that go by the samples; draws and calls backward a second time in each step."""
    model, batches, tests = loop.wrap(network or Counting()), loop.batches(few(42)), loop.evaluation(few(9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    drawn = []

    def loss_of(part):
        drawn.append(torch.rand(()).item())
        return drawn[-1] * F.cross_entropy(model(part[0]), part[1])

    def scaled_loss(scale, part):
        return scale * loss_of(part)

    for _ in loop.epochs():
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            drawn.clear()
            loss = loop.backward(batch, loss_of)
            of_first, scale = {*drawn}, torch.rand(())
            drawn.clear()
            loop.backward(batch, partial(scaled_loss, scale))
            assert of_first.isdisjoint(drawn)
            optimizer.step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def follows_its_evaluations(loop: Loop):
    """Its learning rate follows what the last evaluation has measured, which draws, too."""
    model, batches, tests, optimizer = linear(loop)

    def loss_of(part):
        return F.cross_entropy(model(part[0]), part[1])

    for _ in loop.epochs():
        for batch in batches:
            optimizer.zero_grad()
            loss = loop.backward(batch, loss_of)
            optimizer.step()
            loop.log(loss=loss)
        with torch.no_grad():
            for inputs, labels in tests:
                loss = F.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), labels, reduction="sum")
                loop.measured(loss=(loss, len(labels)), drawn=torch.rand(len(labels)))
        found = loop.evaluated(one=1.0)
        assert found["one"] == 1
        for group in optimizer.param_groups:
            group["lr"] *= 1 + found["loss"] / 1000 + found["drawn"] / 1000
        for weight in model.parameters():  # all ranks draw alike, however many batches each has evaluated
            weight.data += 1e-3 * torch.rand_like(weight)


def evaluates_first(loop: Loop, mistake=""):
    """Evaluates before the steps of an epoch, and passes over the same data beside each step; all of it draws."""
    model, batches, tests = loop.wrap(network(0.3)), loop.batches(Drawn()), loop.evaluation(few(27))
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), nn.Identity()
    other.register_buffer("seen", torch.zeros(()))
    loop.keep(model=model, optimizer=optimizer, other=other)
    assert len(tests) == sum(1 for _ in tests)

    def loss_of(part):
        return F.cross_entropy(model(part[0]), part[1])

    for _ in loop.epochs():
        model.train(mistake == "trains")
        with torch.no_grad():
            for number, (inputs, labels) in enumerate(tests):
                loop.measured(loss=F.cross_entropy(model(inputs) + torch.rand(()), labels, reduction="none"))
                if mistake == "leaves" and number == 1:
                    break
                if mistake == "replaces":
                    other.seen = inputs.mean()
                if mistake == "fills":
                    other.get_buffer("seen").data.copy_(inputs.mean())
        if mistake != "adds nothing up":
            loop.evaluated()
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = loop.backward(batch, loss_of)
            optimizer.step()
            model.eval()
            with torch.no_grad():
                for inputs, _ in tests:
                    model(inputs + torch.rand(()))
            model.train()
            loop.log(loss=loss)


def adds_nothing_up(loop: Loop):
    evaluates_first(loop, "adds nothing up")


def leaves_an_evaluation(loop: Loop):
    evaluates_first(loop, "leaves")


def replaces_a_buffer_while_it_evaluates(loop: Loop):
    """Whose new tensor nobody has changed in place, as nobody had the one before."""
    evaluates_first(loop, "replaces")


def fills_a_buffer_while_it_evaluates(loop: Loop):
    """By .data, which leaves torch's version counter as it is."""
    evaluates_first(loop, "fills")


def evaluates_in_training_mode(loop: Loop):
    evaluates_first(loop, "trains")


def measures_a_mean(loop: Loop):
    model, _, tests, _ = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in tests:
            loop.measured(loss=F.cross_entropy(model(inputs), labels))


def measures_outside(loop: Loop):
    """Measures what is no batch of an evaluation."""
    linear(loop)
    for _ in loop.epochs():
        loop.measured(loss=torch.ones(1))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, inputs, name="first"):
        return getattr(self, name)(inputs)


def trains_one_of_two(loop: Loop):
    """Uses one of two networks in each step; the other's weights have no gradients."""
    model, batches, tests = loop.wrap(Two()), loop.batches(few(42)), loop.evaluation(few(9))
    networks = {name: getattr(model.module, name) for name in ("first", "second")}
    optimizers = {name: torch.optim.AdamW(each.parameters(), weight_decay=0.5) for name, each in networks.items()}
    loop.keep(model=model, **optimizers)

    def loss_of(used, part):
        return F.cross_entropy(model(part[0], used), part[1])

    for _ in loop.epochs():
        for number, batch in enumerate(batches):
            used, other = ("first", "second") if number % 2 else ("second", "first")
            optimizers[used].zero_grad()
            optimizers[other].zero_grad()
            loss = loop.backward(batch, partial(loss_of, used))
            assert all(weight.grad is None for weight in networks[other].parameters())
            optimizers[used].step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


class Checkpointed(nn.Module):
    """Uses a layer twice within a reentrant checkpoint, which has its gradients come twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        inner = checkpoint(self.layer, inputs.requires_grad_(), use_reentrant=True)
        return self.last(checkpoint(self.layer, inner, use_reentrant=True))


def has_gradients_twice(loop: Loop):
    model, batches = loop.wrap(Checkpointed()), loop.batches(few(42))
    loop.keep(model=model)
    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))


def has_gradients_changed(loop: Loop, hook=None, is_zeroed=False):
    """Train with a hook, or as closures begin: with zero_grad() where the loss is computed."""
    model, batches, tests, optimizer = linear(loop)
    for weight in model.parameters() if hook else ():
        weight.register_post_accumulate_grad_hook(hook)

    def loss_of(part):
        if is_zeroed:
            optimizer.zero_grad()
        return F.cross_entropy(model(part[0]), part[1])

    for _ in loop.epochs():
        for batch in batches:
            optimizer.zero_grad()
            loss = loop.backward(batch, loss_of)
            optimizer.step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def has_gradients_replaced(loop: Loop):
    has_gradients_changed(loop, lambda weight: setattr(weight, "grad", weight.grad * 0.1))


def has_gradients_scaled(loop: Loop):
    def scale(weight):
        weight.grad *= 0.1

    has_gradients_changed(loop, scale)


def has_gradients_zeroed(loop: Loop):
    has_gradients_changed(loop, is_zeroed=True)


def evaluates_in_a_step(loop: Loop):
    """Logs what an evaluation with dropout measures in the middle of a step, and what is drawn after it."""
    model, batches, tests = loop.wrap(network(0.3)), loop.batches(few(42)), loop.evaluation(few(9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for batch in batches:
            model.eval()
            model.get_submodule("module.3").train()
            with torch.no_grad():
                for inputs, labels in tests:
                    loop.measured(loss=F.cross_entropy(model(inputs), labels, reduction="none"))
            measured = torch.tensor(loop.evaluated()["loss"])  # float32, whose mean over equal ranks is exact
            drawn = torch.rand(())
            model.train()
            optimizer.zero_grad()
            loss = loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            optimizer.step()
            loop.log(loss=loss, measured=measured, drawn=drawn)
        evaluate(loop, model, tests)


def moves_a_kept_teacher(loop: Loop):
    """Move a teacher that is no part of the wrapped network where the loss is computed."""
    model, teacher, batches = loop.wrap(nn.Linear(8, 3)), nn.Linear(8, 3).requires_grad_(False), loop.batches(few(42))
    loop.keep(model=model, teacher=teacher)

    def loss_of(part):
        teacher.weight.mul_(0.9)
        return F.cross_entropy(model(part[0]) + teacher(part[0]), part[1])

    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, loss_of)


class Centered(nn.Module):
    """Sets its offset by the first batch that it gets, as ActNorm does."""

    is_set: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.offset = nn.Parameter(torch.zeros(8))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def forward(self, inputs):
        if not self.is_set:
            self.offset.data.copy_(inputs.mean(0))
            self.is_set.fill_(True)
        return self.layer(inputs - self.offset)


def sets_a_weight(loop: Loop):
    model, batches = loop.wrap(Centered()), loop.batches(few(42))
    loop.keep(model=model)
    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))


def trains_the_loss(loop: Loop):
    model, batches = loop.wrap(nn.Linear(8, 3)), loop.batches(few(42))
    loss_scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), loss_scale], 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for batch in batches:
            loop.backward(batch, lambda part: F.cross_entropy(model(part[0]) * loss_scale, part[1]))
            optimizer.step()


def wraps_twice(loop: Loop):
    loop.wrap(nn.Linear(8, 3))
    loop.wrap(nn.Linear(8, 3))


def accumulates(loop: Loop):
    loop.wrap(nn.Linear(8, 3)).no_sync()


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
