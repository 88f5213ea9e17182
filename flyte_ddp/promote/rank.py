"""The measuring of models side by side in a process of its own: the same samples, the same measures, in float32."""

from collections.abc import Sequence

import torch

from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.evaluation import measure
from flyte_ddp.engine.job import Job, Measured
from flyte_ddp.engine.load import load_recipe, load_split
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link


def measure_models(environment: Environment, link: Link, argument: tuple[Sequence[Job], str]) -> list[Measured]:
    """Measure the jobs' models, in order.

    The first one is the candidate, whose recipe provides samples and measures for all. So a change since the last
    promotion affects all alike.

    Args:
        environment: the rank's environment.
        link: the link to the parent.
        argument: the jobs, and the promoted model in words, for an error.
    """
    (candidate, *others), current = argument
    torch.set_num_threads(environment.threads)
    settle_arithmetic()
    device = torch.device(environment.world.device)
    with BlockCache(environment) as cache:
        recipe = load_recipe(candidate, device)
        test = load_split(recipe, "test", candidate, cache)
        network = recipe.trained_model(candidate.model_path).to(device)
        measured = [measure(recipe, network, test, link)]
        for job in others:
            other = load_recipe(job, device)
            other.share = recipe.share  # measure() updates only the share of the recipe that it gets
            network = other.trained_model(job.model_path, current, "choose another place").to(device)
            measured.append(measure(recipe, network, test, link, other.forward))
    return measured
