"""Trying a recipe takes no more memory than a step: weights, gradients, and twice as much of the optimizer."""

import torch
from torch import nn

from flyte_ddp.engine.batches.splits import Resident, Split
from flyte_ddp.engine.checks.probe import probe
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.process_group import process_group
from tests.engine.probe_recipes import WIDTH, Settings, Sound


class Wide(Sound):
    """Of 4 million parameters, beside which eight samples are nothing."""

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, 1000), *(nn.Linear(1000, 1000) for _ in range(4)), nn.Linear(1000, WIDTH))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), fused=True)


def test_the_trials_peak_at_what_a_step_takes(tmp_path):
    environment = Environment(World(1, 1, "gloo", "cpu"), 0, 0, f"file://{tmp_path}/rendezvous", 1)
    with process_group(environment, 60):
        recipe = Wide(Settings())
        model = recipe.model()
        splits: dict[str, Split] = {
            name: Resident(recipe.data(name), torch.device("cpu")) for name in ("train", "test")
        }
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            probe(recipe, model, splits, steps=10, constant_loss=0)
    used = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    weights = sum(weight.nbytes for weight in model.parameters())
    assert 2 < 1 + peak / weights < 4.2
    assert used < 0.1 * weights
