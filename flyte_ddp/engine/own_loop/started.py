"""What is told of a loop of the user's own when it starts."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.results import layers_of
from flyte_ddp.events import EpochFinished, RunStarted, digests_of
from flyte_ddp.launch.environment import World


class Position(Protocol):
    """As much of Progress as is told."""

    epoch: int
    step: int
    parts: dict[str, Any]
    batches: TrainBatches | None
    steps: int
    test_samples: int
    history: list[EpochFinished]
    ran_on: list[dict[str, Any]]


def run_started(
    position: Position, job: Job, world: World, hosts: list[str], headline: str, percent: tuple[str, ...],
    precision: str, remarks: Sequence[str],
) -> RunStarted:  # fmt: skip
    batches = position.batches
    assert batches  # Progress.start has seen to that
    return RunStarted(
        dataset=job.dataset,
        samples="samples",
        headline=headline,
        percent=percent,
        train_samples=len(batches.split),
        test_samples=position.test_samples,
        samples_per_epoch=position.steps * batches.batch_size,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=precision,
        epochs=job.settings.epochs,
        steps_per_epoch=position.steps,
        first_epoch=position.epoch,
        first_step=position.step,
        startup_seconds=time.time() - job.launched,
        layers=layers_of(position.parts["model"]),
        remarks=["trained by a loop of your own", *remarks],
        hosts=hosts,
        identity=job.identity,
        ran_on=position.ran_on,
        earlier=digests_of(position.history),
    )
