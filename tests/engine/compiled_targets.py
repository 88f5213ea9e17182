"""What tests of compiling have ranks do, and a recipe for them."""

import sys
from functools import partial

import torch
from torch import nn

from flyte_ddp.engine import set_up, worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.events import Event, RunStarted
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from tests.engine.probe_recipes import SIZE, WIDTH, Sound


def count_compiled(environment: Environment, link: Link, job: Job) -> tuple[TrainingResult, int, int]:
    """The result, and how many pieces of code were compiled before the first step, and in the end.

    For a CPU, and without a compiler of C++. Compiling again in a step fails, unless sharded, with torch's reason.
    """
    vars(set_up)["check_device"] = lambda device: None
    vars(torch)["compile"] = partial(torch.compile, backend="eager")
    emit, begun = link.emit, []

    def note(event: Event) -> None:
        if isinstance(event, RunStarted):
            begun.append(pieces())
            torch._dynamo.config.error_on_recompile = job.options.sharding == "off"
        emit(event)

    vars(link)["emit"] = note
    result = worker.run(environment, link, job)
    return result, begun[0], pieces()


def pieces() -> int:
    """Those that are compiled: none where torch's compiler has not even been imported, which takes seconds."""
    counters = vars(sys.modules["torch._dynamo.utils"]).get("counters")
    return int(counters["frames"]["ok"]) if counters else 0


class Numbered(Sound):
    """A dozen layers, each of which is compiled anew, as those of transformers that know their number."""

    fsdp_units = ("layers.*",)

    def model(self):
        network = nn.Sequential()
        network.layers = nn.Sequential(*(Scaled(number) for number in range(12)))
        return network


class Scaled(nn.Linear):
    def __init__(self, number):
        super().__init__(WIDTH, WIDTH)
        self.number = number

    def forward(self, features):
        return features + super().forward(features) / (2 + self.number)


class Whole(Sound):
    """Names no layers, so that its network is compiled as one, around what draws or normalises; rather uneven."""

    def model(self):
        layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(*layers)

    def forward(self, model, batch):
        return model(batch * torch.rand(len(batch), 1))


class OneStep(Whole):
    train_fraction = 10 / SIZE
