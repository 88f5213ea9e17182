"""A rank that computes other bits than the others is named, and nobody else is.

Its ranks import this module: without flytekit, and so without tests.commands, which would take each of them 2 s.
"""

import os
import random
import re

import pytest
import torch
from torch import distributed

from flyte_ddp.engine.audit import Cause, choose_part, judge
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.errors import InputError
from flyte_ddp.events import NotLearning
from flyte_ddp.launch.failures import RecoverableRankError
from flyte_ddp.recipes.images import ImageClassifier
from tests.commands import free_port
from tests.engine.virtual_ranks.test_same_bits import BATCH_NORM, SHORT
from tests.programs import run_on_two_nodes
from tests.small_training import first_and_slow, identical

IN_PLACE = {"recipe": f"{__name__}:InPlace", "batch_size": 15, "train_fraction": 64 / 318}
HALVES = {"precision": "bfloat16", "validation_fraction": 0.1}
SEEDS = range(int(os.environ.get("DDP_TEST_SEEDS", 1)))


class Flipping(ImageClassifier):
    """From the fourth step on, one rank flips a random bit of its gradients in each first pass of a step."""

    rank, first, always, now, flipped = 1, 3, False, 0, -1

    def model(self):
        model = super().model()
        self.random = random.Random(self.settings.seed)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.flip)
        self.victim = self.random.randrange(len(list(model.parameters())))
        self.of = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        return model

    def lr_lambda(self, step, total_steps):
        self.now = step
        return super().lr_lambda(step, total_steps)

    def flip(self, parameter):
        if self.of.get(id(parameter)) != self.victim or self.now < self.first or distributed.get_rank() != self.rank:
            return
        if self.always or self.flipped != self.now:
            self.flipped = self.now
            # In whole numbers: the gradient of a virtual rank has its memory
            place = torch.tensor(self.random.randrange(parameter.numel()))
            bits = parameter.grad[torch.unravel_index(place, parameter.shape)].view(torch.int32)
            bits ^= 1 << self.random.randrange(31)


class FlippingFromTheStart(Flipping):
    first = 0


class Stuck(Flipping):
    """It is the same bit each time."""

    always = True

    def flip(self, parameter):
        self.random = random.Random(1)
        super().flip(parameter)


class Drawing(ImageClassifier):
    """From its 25th call on, which a rank of two parts makes first, its network draws from a generator of its own."""

    def model(self):
        model = super().model()
        self.calls, self.random = 0, random.Random(1)
        model.register_forward_hook(self.scaled)
        return model

    def scaled(self, module, inputs, outputs):
        self.calls += module.training
        return outputs * (0.5 + self.random.random()) if self.calls > 25 and module.training else outputs


class InPlace(ImageClassifier):
    """Its forward pass changes what it is given, which it is given in another layout."""

    def augment(self, batch, draw):
        images, labels = batch
        return images.transpose(2, 3).contiguous().transpose(2, 3), labels

    def forward(self, model, batch):
        batch[0].mul_(2)
        return super().forward(model, batch)


class Putting(ImageClassifier):
    """Its network uses an operation of which torch has no deterministic version, on a CPU either."""

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        return outputs + torch.zeros(10).put_(torch.tensor([1]), torch.tensor([0.5]))


class Drifting(ImageClassifier):
    """On rank 2, an optimizer's step once goes wrong in the last bit of a weight."""

    def lr_lambda(self, step, total_steps):
        if step == 7 and distributed.get_rank() == 2:
            next(self.network.parameters()).data.view(-1)[5:6].view(torch.int32).bitwise_xor_(1)
        return super().lr_lambda(step, total_steps)

    def optimizer(self, model):
        self.network = model
        return super().optimizer(model)


@pytest.mark.parametrize("seed", first_and_slow(*SEEDS))
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_with_a_wrong_bit_in_a_gradient_is_named_within_100_steps(train, seed, ranks):
    with pytest.raises(RecoverableRankError, match="WrongBitsError") as raised:
        train(ranks, recipe=f"{__name__}:Flipping", virtual_ranks=ranks, audit_every=7, epochs=5, seed=seed)
    found = re.findall(r"in epoch (\d), step (\d+), rank 1 on \S+ \(CPU, \w+\) computed", str(raised.value))
    assert [(20 * (int(epoch) - 1) + int(step)) % 7 for epoch, step in found] == [0]


def test_code_that_begins_to_draw_is_named_and_no_host(train):
    with pytest.raises(InputError, match=r"^in epoch \d, step \d+, gradients of the same samples have other bits each"):
        train(3, recipe=f"{__name__}:Drawing", virtual_ranks=4, audit_every=3, epochs=2)


@pytest.mark.slow
def test_two_ranks_that_differ_in_the_same_way_each_time_are_named_both(train):
    words = "have other bits on each of rank 0 on .*, rank 1 on .*: code reads its rank or host, or counts"
    with pytest.raises(RecoverableRankError, match=words):
        train(2, recipe=f"{__name__}:Stuck", virtual_ranks=2, audit_every=1)


@pytest.mark.slow
def test_one_that_is_wrong_from_the_start_is_worth_another_attempt(train):
    with pytest.raises(RecoverableRankError, match=r"in epoch 1, step 1, rank 1 on \S+ \(CPU, \w+\) computed"):
        train(3, recipe=f"{__name__}:FlippingFromTheStart", virtual_ranks=3, audit_every=100)


@pytest.mark.parametrize(
    ("digests", "products", "cause", "odd", "others"),
    [
        ([[1, 5, 1, 1], [1, 1]], [], Cause.PROCESSOR, [0], []),
        ([[1, 1], [5, 1, 1], [1, 1]], [], Cause.PROCESSOR, [1], []),
        ([[1, 2, 3], [4, 5, 6]], [], Cause.CODE, [0, 1], []),
        ([[1, 1, 1], [1, 2, 3], [1, 1, 1]], [], Cause.CODE, [1], []),  # it counts, and this rank has more calls
        ([[1, 2, 2, 2], [1, 1, 1]], [], Cause.CODE, [0], []),  # likewise
        ([[1, 2, 2, 2], [1, 2, 2]], [], Cause.CODE, [0, 1], []),
        ([[1, 1, 1], [1, 2, 3], [1, 1, 1]], [1], Cause.PROCESSOR, [1], []),
        ([[1, 1], [7, 7]], [], Cause.RANKS, [0, 1], []),
        ([[1, 1], [7, 7]], [1], Cause.PROCESSOR, [1], []),
        ([[1, 1], [1, 1], [7, 7]], [], Cause.RANKS, [2], [0, 1]),
        ([[1], [1], [7], [7]], [], Cause.RANKS, [0, 1, 2, 3], []),
    ],
)
def test_whether_ranks_agree_is_asked_after_whether_each_agrees_with_itself(digests, products, cause, odd, others):
    verdict = judge(dict(enumerate(digests)), products)
    assert (verdict.cause, [*verdict.odd], [*verdict.others]) == (cause, odd, others)
    assert verdict.is_sure == (cause is Cause.PROCESSOR and bool(products))


def test_a_rank_whose_optimizer_has_gone_wrong_is_named_at_the_evaluation(train):
    with pytest.raises(RecoverableRankError, match=r"in epoch 1, step 20, weights, or .* on rank 2 on .* than on ra"):
        train(3, recipe=f"{__name__}:Drifting", virtual_ranks=3, audit_every=1000)


@pytest.mark.parametrize(
    "settings", first_and_slow(IN_PLACE, SHORT, {**BATCH_NORM, **HALVES}, *({"seed": seed} for seed in SEEDS[1:]))
)
def test_what_is_right_gives_the_same_bits_as_without_and_no_word(train, whole, settings):
    plain = whole(1, virtual_ranks=4, **settings)
    audited = train(3, virtual_ranks=4, audit_every=1, **settings)
    assert identical(plain, audited)
    assert not [event for event in audited.events if isinstance(event, NotLearning) and "bits" in event.reason]


PROGRAM = """
import sys
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
data, output = sys.argv[1:]
for every in (0, 5):
    hp, options = Hyperparameters(epochs=1, virtual_ranks=2), RunOptions(audit_every=every, tracking="off")
    train("flyte_ddp.recipes.images:ImageClassifier", hp, options, data=data, output=output, on_event=print)
    print("trained without an audit")
"""
SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}


@pytest.mark.slow
def test_processors_that_compute_other_bits_are_named_before_the_first_step(tmp_path, small_data):
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = str(small_data), str(tmp_path / "out")
    said = run_on_two_nodes(tmp_path / "program.py", free_port(), *arguments, nodes=[{}, SSE])
    odd = r"have other bits on each of rank 0 on \S+ \(CPU, \w+\), rank 1 on \S+ \(CPU, DEFAULT\)"
    without, _, _ = said[0].printed.partition("trained without an audit\n")
    assert re.search(rf"NotLearning\(.*{odd}: the result depends", without), said
    assert said[1].printed == "trained without an audit\n"
    assert re.search(rf"audit_every must be 0 .* got 5: .*{odd}", said[0].error), said
    assert "got 5" in said[1].error


def test_each_rank_of_many_is_audited_and_always_by_one_of_another_host():
    train = TrainBatches(Resident(torch.zeros(128), torch.device("cpu")), 128, 1, 0, 64, virtual_ranks=64)
    hosts = [f"host {rank // 8}" for rank in range(64)]
    triples = [choose_part(train, hosts, epoch, 0) for epoch in range(1000)]
    assert all(hosts[owner] != hosts[other] for _, owner, other in triples)
    assert all(part == owner for part, owner, _ in triples)
    assert len({owner for _, owner, _ in triples}) == len({other for _, _, other in triples}) == 64
    assert triples == [choose_part(train, hosts, epoch, 0) for epoch in range(1000)]


def test_without_virtual_ranks_it_is_refused(train):
    with pytest.raises(InputError, match=r"audit_every must be 0 without virtual_ranks, .* got 10: set virtual_ranks"):
        train(2, audit_every=10)


def test_an_operation_that_is_not_deterministic_is_named_in_the_first_step(train):
    with pytest.raises(InputError, match=r"^put_ has other bits each time, .* virtual_ranks to 0$"):
        train(1, recipe=f"{__name__}:Putting", virtual_ranks=2)
