"""Measures models side by side in a process of its own: the same samples, the same measures, in float32."""

import random
from typing import List

import numpy as np
import torch
from torch import nn

from flyte_ddp.engine.batches import TestBatches
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.measures import headline_of, pairs_of, ratios, sums_of
from flyte_ddp.engine.set_up import load_recipe, open_split
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.promote.job import Comparison, Measured
from flyte_ddp.recipe import Recipe, load_weights


@torch.inference_mode()
def measure(environment: Environment, link: Link, comparison: Comparison) -> List[Measured]:
    """In the order of the jobs. The candidate's recipe gives the samples and measures what every network makes of them,
    so that a change of either since the last promotion counts for both."""
    torch.set_num_threads(environment.threads)
    device = torch.device(environment.world.device)
    first = comparison.jobs[0]
    recipe = seeded_recipe(first, device)
    batches = TestBatches(open_split(recipe, "test", first), first.identity.settings.test_batch_size, 0, 1)
    found = []
    for number, job in enumerate(comparison.jobs):
        other = seeded_recipe(job, device) if number else recipe
        model = other.model()
        if fault := fault_of(model, job.model_path):
            found.append(Measured({}, "", recipe.shares, len(batches.split), fault))
            continue
        found.append(measure_one(recipe, other, model.to(device).eval(), batches, link))
    return found


def measure_one(recipe: Recipe, other: Recipe, model: nn.Module, batches: TestBatches, link: Link) -> Measured:
    """recipe: measures; other: knows how its model takes a batch."""
    sums, names = torch.zeros((), dtype=torch.float64, device=batches.split.device), list[str]()
    for batch in batches:
        for one in (recipe, other):
            vars(one.share).update(vars(batch.share), alone=True)
        pairs = pairs_of(recipe, other.forward(model, batch.tree), batch, names)
        sums, names = sums + sums_of(pairs), list(pairs)
        link.alive()
    measures = ratios(recipe, names, sums.tolist())
    return Measured(measures, headline_of(recipe, measures), recipe.shares, len(batches.split))


def seeded_recipe(job: Job, device: torch.device) -> Recipe:
    """With the random numbers that its training had, by which it may have drawn its test split."""
    seed = job.identity.settings.seed
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return load_recipe(job, device)


def fault_of(model: nn.Module, path: str) -> str:
    """Loads the weights; returns what keeps them from being this network's, as the end of 'the file …', or nothing."""
    try:
        weights = load_weights(path)
    except InputError:  # safetensors is not installed
        raise
    except Exception as error:  # of zipfile, pickle and torch; their advice would be to trust the file
        return f"is no file of weights that can be read safely ({type(error).__name__})"
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        return f"belongs to another network: {' '.join(str(error).split())[:300]}"
    return ""
