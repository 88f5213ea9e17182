"""Training loops with the mistakes that people make: what is refused, or warned of."""

from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from flyte_ddp import Loop
from tests.engine.optimizer_recipes import Outer, Slow, Whole
from tests.engine.own_loops import Drawn, changes_what_it_trains, evaluate, few, linear, network, plain, step


def never_steps_by_the_last_gradients(loop: Loop):
    """An optimizer steps in the first epoch alone; gradients come on, of each rank's own."""
    model, batches, tests, optimizer = linear(loop)
    for epoch in loop.epochs():
        for inputs, labels in batches:
            with model.no_sync() if epoch else nullcontext():
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
            if not epoch:
                optimizer.step()
                optimizer.zero_grad()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def learns_a_weight_of_its_loss(loop: Loop, is_kept=True):
    model, batches, tests, _ = linear(loop, is_kept=False)
    weight = nn.Parameter(torch.ones(3, device=loop.device))
    optimizer = torch.optim.SGD([*model.parameters(), weight], 0.1)
    loop.keep(model=model, optimizer=optimizer, **({"loss": nn.ParameterList([weight])} if is_kept else {}))
    for _ in loop.epochs():
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs) * weight, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)
        evaluate(loop, model, tests)


def forgets_a_weight_of_its_loss(loop: Loop):
    learns_a_weight_of_its_loss(loop, is_kept=False)


def forgets_its_schedule(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            schedule.step()


def forgets_a_schedule_by_measures(loop: Loop):
    """Which does not mark its optimizer, as others do."""
    model, batches, _, optimizer = linear(loop)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            schedule.step(1.0)


def forgets_the_optimizer_within(loop: Loop):
    model, batches, _, _ = linear(loop, is_kept=False)
    optimizer = Outer(torch.optim.Adam(model.parameters()))
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)


def counts_beside_the_state(loop: Loop, kind=Slow):
    model, batches, tests, _ = linear(loop, is_kept=False)
    optimizer = kind(model.parameters())
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        evaluate(loop, model, tests)


def counts_in_the_state(loop: Loop):
    counts_beside_the_state(loop, Whole)


class Remembering(nn.Linear):
    """Adds what it has seen last, which no checkpoint has."""

    last: torch.Tensor

    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, inputs):
        outputs = super().forward(inputs) + self.last
        self.last = outputs.detach().mean(0)
        return outputs


def keeps_a_buffer_to_itself(loop: Loop):
    model, batches = loop.wrap(Remembering()), loop.batches(few(42))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)


class History:
    def __init__(self):
        self.rows = []

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def keeps_an_array_from_the_first_epoch_on(loop: Loop):
    model, batches, tests, optimizer = linear(loop, is_kept=False)
    history = History()
    loop.keep(model=model, optimizer=optimizer, history=history)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        history.rows.append(np.ones(3))
        evaluate(loop, model, tests)


class Banked(nn.Linear):
    """Has a bank of what it has seen, which its first batch creates."""

    bank: torch.Tensor | None

    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("bank", None)

    def forward(self, inputs):
        self.bank = inputs.detach()
        return super().forward(inputs)


def creates_a_buffer_in_its_steps(loop: Loop):
    model, batches = loop.wrap(Banked()), loop.batches(few(42))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)


def keeps_a_schedule_alone(loop: Loop):
    model, batches, _, optimizer = linear(loop, is_kept=False)
    loop.keep(model=model, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for _ in loop.epochs():
        for _ in batches:
            optimizer.step()


def keeps_without_a_name(loop: Loop):
    model, _, _, optimizer = linear(loop, is_kept=False)
    loop.keep(model, optimizer)  # type: ignore[call-arg]


def logs_without_a_name(loop: Loop):
    model, batches, _, _ = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            loop.log(F.cross_entropy(model(inputs), labels))  # type: ignore[call-arg]


def keeps_twice(loop: Loop):
    model, _, _, optimizer = linear(loop, is_kept=False)
    loop.keep(model=model)
    loop.keep(model=model, optimizer=optimizer)


def wraps_what_is_not_trained(loop: Loop):
    loop.wrap(nn.Linear(8, 3).requires_grad_(False))


def calls_the_network_itself(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            loss = F.cross_entropy(model.module(inputs), labels)
            loss.backward()
            optimizer.step()


def leaves_a_layer_unused(loop: Loop):
    layers = nn.Sequential(nn.Linear(8, 3), nn.ModuleDict({"unused": nn.Linear(3, 3)}))
    layers.forward = lambda inputs: layers[0](inputs)  # type: ignore[method-assign]
    model = loop.wrap(layers)
    batches = loop.batches(Drawn())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)


def adds_noise_of_its_own(loop: Loop):
    """To the weights, other noise on each rank."""
    model, batches, tests, optimizer = linear(loop)
    noise = torch.Generator().manual_seed(loop.rank)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            with torch.no_grad():
                model.module.weight += 1e-6 * torch.randn(3, 8, generator=noise)
        evaluate(loop, model, tests)


def evaluates_on_the_first_rank(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        if loop.rank == 0:
            evaluate(loop, model, tests)


def forgets_to_wrap(loop: Loop):
    loop.keep(model=nn.Linear(8, 3))


def keeps_another_optimizer(loop: Loop):
    model = loop.wrap(nn.Linear(8, 3))
    batches = loop.batches(Drawn())
    loop.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    forgotten = torch.optim.SGD(model.parameters(), 0.1)
    for _ in loop.epochs():
        for _ in batches:
            forgotten.step()


def steps_outside_of_a_step(loop: Loop):
    model = loop.wrap(nn.Linear(8, 3))
    loop.batches(Drawn())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        optimizer.step()


def trains_on_two_in_turn(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for one in (batches, loop.batches(few(60))):
            for inputs, labels in one:
                step(loop, model, optimizer, inputs, labels)


def trains_on_two_at_once(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for (inputs, labels), _ in zip(batches, loop.batches(few(60)), strict=False):
            step(loop, model, optimizer, inputs, labels)


def passes_twice(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for _ in range(2):
            for inputs, labels in batches:
                step(loop, model, optimizer, inputs, labels)


def keeps_an_iterator(loop: Loop):
    _, batches, _, _ = linear(loop)
    steps = None
    for _ in loop.epochs():
        steps = steps or iter(batches)
        for _ in range(len(batches)):
            next(steps)
            loop.log(loss=0.5)
        loop.evaluated(loss=0.5)


def goes_on_with_an_iterator(loop: Loop):
    _, batches, _, _ = linear(loop)
    steps = iter(batches)
    for _ in loop.epochs():
        for _ in steps:
            loop.log(loss=0.5)
        loop.evaluated(loss=0.5)


def returns_within_an_epoch(loop: Loop, factor=1.0):
    model, batches, tests, optimizer = linear(loop)
    for epoch in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            if epoch == 1 and loop.step == 2:
                loop.log(loss=factor)
                return
        evaluate(loop, model, tests)


def returns_nan(loop: Loop):
    returns_within_an_epoch(loop, float("nan"))


def steps_to_nan(loop: Loop, place=(0, 4), is_left=False, is_stopped=False):
    """One loss is finite and its gradient is not, and neither loss nor measures show what became of the weights."""
    model, batches, tests, optimizer = linear(loop)
    for epoch in loop.epochs(headline="accuracy"):
        for inputs, labels in batches:
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, labels)
            if (epoch, loop.step) == place:
                loss = loss + (outputs - outputs).sum().sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)
            if is_left and (epoch, loop.step) == place:
                return
        for _ in tests:
            loop._link.stop_requested |= is_stopped
        loop.evaluated(accuracy=0.5)


def ends_with_nan(loop: Loop):
    steps_to_nan(loop, (1, 6))


def returns_with_nan(loop: Loop):
    steps_to_nan(loop, (1, 2), is_left=True)


def is_stopped_with_nan(loop: Loop):
    steps_to_nan(loop, (0, 6), is_stopped=True)


def evaluates_nothing(loop: Loop):
    loop.evaluated(loss=(0.0, 0))


def evaluates_a_list(loop: Loop):
    loop.evaluated(accuracy=[3, 4])  # type: ignore[arg-type]


def evaluates_an_array(loop: Loop):
    loop.evaluated(loss=np.ones(3))  # type: ignore[arg-type]


def evaluates_three(loop: Loop):
    loop.evaluated(loss=(1.0, 2.0, 3))  # type: ignore[arg-type]


def measures(loop: Loop, value):
    for _ in loop.evaluation(few(9)):
        loop.measured(accuracy=value)


def measures_an_array(loop: Loop):
    measures(loop, np.ones(9))


def measures_a_mean(loop: Loop):
    measures(loop, np.float32(0.5))


def evaluates_more_on_the_first_rank(loop: Loop):
    loop.evaluated(loss=0.5, **({"score": 1.0} if loop.rank == 0 else {}))


def evaluates_on_the_first_rank_alone(loop: Loop):
    loop.evaluated(**({"loss": 0.5} if loop.rank == 0 else {}))


def logs_more_on_the_last_rank(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            loop.log(loss=0.5, **({"score": 1.0} if loop.rank else {}))


def evaluates_in_any_order(loop: Loop):
    _, batches, _, _ = linear(loop)
    for _ in loop.epochs():
        for _ in batches:
            loop.log(loss=0.5)
        measures: dict[str, Any] = {"loss": 0.1, "share": (0.7, 3), "score": np.nan, "rank": np.float32(loop.rank)}
        loop.evaluated(**dict(sorted(measures.items(), reverse=loop.rank == 0)))


def evaluates_nan(loop: Loop):
    loop.evaluated(loss=float("nan"))


def forgets_to_keep(loop: Loop):
    plain(loop, forgets=["keep"])


def forgets_epochs(loop: Loop):
    plain(loop, forgets=["epochs"])


def forgets_to_log(loop: Loop):
    plain(loop, forgets=["log"])


def logs_a_word(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            loop.log(loss=0.5, phase="warm-up")  # type: ignore[arg-type]


def logs_no_loss(loop: Loop):
    plain(loop, forgets=["loss"])


def forgets_to_evaluate(loop: Loop):
    plain(loop, forgets=["evaluated"])


def unfreezes_what_was_wrapped(loop: Loop):
    changes_what_it_trains(loop)


def names_another_headline(loop: Loop):
    linear(loop)
    for _ in loop.epochs(headline="IoU"):
        loop.evaluated(iou=0.5)


def not_finite(loop: Loop):
    plain(loop, bad_step=4)


class HoldsGenerator(Drawn):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.features[index] + self.generator.random(), self.labels[index]


def has_a_generator_of_its_own(loop: Loop):
    loop.batches(HoldsGenerator())


def has_other_samples_on_each_rank(loop: Loop):
    loop.evaluation((torch.full((9, 8), float(loop.rank)), torch.zeros(9)))


def keeps_what_has_no_state(loop: Loop):
    loop.keep(model=loop.wrap(nn.Linear(1, 1)), learning_rate=0.1)


def trains_without_a_loop(loop: Loop):
    loop.wrap(nn.Linear(1, 1))


def skips_a_step_on_the_last_rank(loop: Loop):
    model, batches, _, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            if loop.rank and loop.step == 2:
                loop.log(loss=0.5)
            else:
                step(loop, model, optimizer, inputs, labels)


def repeats_a_closure_on_the_first_rank(loop: Loop):
    """The network has buffers, which the ranks exchange, too."""
    model, batches = loop.wrap(network(0.0)), loop.batches(Drawn())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.keep(model=model, optimizer=optimizer)
    for _ in loop.epochs():
        for inputs, labels in batches:
            for _ in range(2 - loop.rank):
                step(loop, model, optimizer, inputs, labels)


def leaves_the_steps_on_the_first_rank(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            if not loop.rank:
                break
        evaluate(loop, model, tests)


def returns_on_the_last_rank(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
            if loop.rank:
                return
        evaluate(loop, model, tests)


def averages_over_the_training_batches(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs():
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        evaluate(loop, model, tests)
    update_bn(batches, nn.BatchNorm1d(8))


def gives_a_loader(loop: Loop):
    loop.batches(DataLoader(Drawn(), 12))


def wraps_what_is_wrapped(loop: Loop):
    loop.wrap(nn.DataParallel(nn.Linear(1, 1)))


def starts_the_ranks(loop: Loop):
    torch.distributed.init_process_group("gloo")


def ends_the_ranks(loop: Loop):
    plain(loop)
    torch.distributed.destroy_process_group()


def takes_nothing():
    pass


def trains_in_two_phases(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in range(2):
        for _ in loop.epochs(headline="accuracy", best="highest"):
            for inputs, labels in batches:
                step(loop, model, optimizer, inputs, labels)
            evaluate(loop, model, tests)
            break


def tests_after_it_has_left_the_epochs(loop: Loop):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs(headline="loss", best="lowest"):
        for inputs, labels in batches:
            step(loop, model, optimizer, inputs, labels)
        evaluate(loop, model, tests)
        break
    evaluate(loop, model, tests)


def evaluates_before_the_last_steps(loop: Loop, best: Literal["lowest", ""] = "lowest"):
    model, batches, tests, optimizer = linear(loop)
    for _ in loop.epochs(headline="loss", best=best):
        for number, (inputs, labels) in enumerate(batches):
            if number == 5:
                evaluate(loop, model, tests)
            step(loop, model, optimizer, inputs, labels)


def returns_what_it_has_not_evaluated(loop: Loop):
    evaluates_before_the_last_steps(loop, best="")
