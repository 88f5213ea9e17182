"""What ranks run in place of flyte_ddp.lightning.rank."""

from dataclasses import replace

from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.lightning import rank
from flyte_ddp.lightning.job import LightningJob


def on_two_hosts(environment: Environment, link: Link, job: LightningJob) -> TrainingResult:
    """The second rank has no files of the first."""
    if environment.rank:
        job = replace(job, model_path="", checkpoint_path="", logs="")
    return rank.run(environment, link, job)
