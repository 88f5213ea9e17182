"""What tests of many recipes have ranks do: train them one after the other, in the same processes."""

from dataclasses import replace

from torch.distributed import FileStore  # type: ignore[attr-defined]

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group


def train_each(environment: Environment, link: Link, asked: list[tuple[Job, int]]) -> list[TrainingResult | None]:
    """Train each job on the first so many ranks, and return its results; None on the other ranks."""
    results = []
    for job, ranks in asked:
        result = None
        if environment.rank < ranks:
            here = replace(environment, world=World(ranks, ranks, "gloo", "cpu"))
            with process_group(here, 60, FileStore(f"{job.model_path}.store", ranks)) as device:
                result = worker.train(here, device, link, job)
        results.append(result)
    return results
