"""What ranks run in place of flyte_ddp.lightning.rank."""

from dataclasses import replace

import torch

from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.lightning import rank
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.requests import Requests


def on_two_hosts(environment: Environment, link: Link, job: LightningJob) -> TrainingResult:
    """The second rank has no files of the first."""
    if environment.rank:
        job = replace(job, model_path="", checkpoint_path="", logs="")
    return rank.run(environment, link, job)


def exchange_requests(environment: Environment, link: Link, step_seconds: float) -> list[int]:
    """Return in which of 40 steps a rank hears that the last one was asked to stop before the first."""
    with process_group(environment, 60.0):
        requests = Requests(torch.device("cpu"), seconds=30.0)
        requests.keep_pace(step_seconds)
        is_asked = environment.rank == environment.world.size - 1
        return [step for step in range(1, 41) if requests.exchange(is_asked, save=False).stop]
