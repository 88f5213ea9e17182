"""A list of what flyte2/ would deploy, made without a cluster of Flyte 2: python -m scripts.dry_run2 [IMAGE]."""

import sys
from typing import Any

import flyte

from flyte2 import inference, mnist, multinode, promote, sweep
from scripts.dry_run import ROOT, describe_task, show, summary


def main(image: str = "flyte-ddp-training:latest") -> None:
    # Nothing is sent to this address
    flyte.init(endpoint="localhost:1", root_dir=ROOT, images={"trainer": image}, project="PROJECT", domain="DOMAIN")
    environments = [module.workflow for module in (mnist, sweep, promote, inference, multinode)]
    deployments = flyte.deploy(
        *environments, promote.roll_back_environment, dry_run=True, version="dry-run", copy_style="none"
    )
    deployed: list[Any] = [environment for one in deployments for environment in one.envs.values()]
    tasks = {
        one.get_name(): one.deployed_task.task_template
        for environment in deployed
        for one in environment.deployed_entities
    }
    show("Tasks", {name: describe_task(task) for name, task in tasks.items()})
    print(*summary(tasks), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
