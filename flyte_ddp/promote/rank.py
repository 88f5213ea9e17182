"""The measuring of models side by side in a process of its own: the same samples, the same measures, in float32."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.evaluation import measure
from flyte_ddp.engine.job import Job, Measured
from flyte_ddp.engine.load import load_recipe, load_split
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Recipe


def measure_models(environment: Environment, link: Link, argument: tuple[Sequence[Job], str]) -> list[Measured]:
    """Measure the jobs' models on the test split, in float32, and return their measures in the order of the jobs.

    A process of its own runs the function, by run_alone, on a CPU or a GPU. The first job is that of the candidate, the
    model that may be promoted. The candidate's recipe loads the samples and computes the measures of every model, so a
    change of the recipe since the last promotion affects all models alike. Each model's own recipe builds the network
    and computes the outputs.

    Args:
        environment: this process, which computes alone.
        link: tells the parent process after each batch that this process is alive.
        argument: the jobs; and what messages call the models of all jobs but the first.

    Raises:
        InputError: a recipe, its data or the weights of a model cannot be used.
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
            network = other.trained_model(job.model_path, current, "choose another place").to(device)
            measured.append(measure(recipe, network, test, link, partial(_forward, other, recipe)))
    return measured


def _forward(other: Recipe, recipe: Recipe, network: nn.Module, batch: Any) -> Any:
    """Call another recipe's forward, with the share that the measuring recipe has."""
    other.share = recipe.share
    return other.forward(network, batch)
