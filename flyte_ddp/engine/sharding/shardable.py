"""Refusals, before training, of what cannot be sharded, or not yet. Each says what to do about it."""

import importlib.util

import torch
from torch import nn

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.attributes import matching_layers
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.sharding.sharding import OFF
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.launch.environment import Environment
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions


def check_recipe(recipe: Recipe, options: RunOptions, environment: Environment) -> None:
    """Raise InputError if a recipe, an option or the environment does not go with sharding.

    It is raised for a torch that is too old, missing safetensors, a recipe without fsdp_units or with micro_batch = -1,
    options.log_gradients, and GPUs with another backend than nccl. The network need not be built yet.

    Args:
        recipe: the recipe.
        options: the options of the run.
        environment: has the device and the backend of the ranks.
    """
    from torch.distributed.fsdp import FSDPModule  # this import is slow, and only sharding needs it

    owner = type(recipe).__name__
    world = environment.world
    reduces_unused = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    has_safetensors = importlib.util.find_spec("safetensors") is not None
    on_gpus_by_gloo = world.device == "cuda" and world.backend != "nccl"
    for is_refused, problem in (
        (not reduces_unused, f"sharding needs torch 2.15 or later, got {torch.__version__}: install it"),
        (not has_safetensors, f"sharding needs {not_installed('safetensors', 'sharding')}"),
        (
            not recipe.fsdp_units,
            f'{owner}.fsdp_units must name layers with sharding, such as ("blocks.*",), got none: do so',
        ),
        (recipe.micro_batch < 0, f"{owner}.micro_batch must not be -1 with sharding: give a number of samples"),
        (options.log_gradients, "log_gradients must be false with sharding, as no rank has a gradient: leave it out"),
        (on_gpus_by_gloo, f"backend must be nccl to shard over GPUs, got {world.backend}: choose it"),
    ):
        if is_refused:
            raise InputError(f"{problem}, {OFF}")


def check_weights(recipe: Recipe, model: nn.Module) -> None:
    """Raise InputError for a weight that cannot be sharded.

    Such a weight has no dimensions, has a hook on its gradient, or is the same tensor as a weight in another FSDP unit.

    Args:
        recipe: the recipe, whose fsdp_units names the layers that are units.
        model: the network.
    """
    where = code_location(recipe, "model")
    units = matching_layers(recipe, "fsdp_units", model)
    firsts: dict[int, tuple[str, str | None]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), None)
        if not weight.ndim:
            raise InputError(f"{where}: {name} has no rows to shard: give it the shape (1,), {OFF}")
        if torch_compat.has_gradient_hooks(weight):
            raise InputError(f"{where}: {name} has a hook on its gradient, which sharding would lose: remove it, {OFF}")
        first, its_unit = firsts.setdefault(id(weight), (name, unit))
        if its_unit != unit:
            raise InputError(
                f"{type(recipe).__name__}.fsdp_units must keep tied weights together, but {name} is {first}, too: name "
                f"a layer that has both, or none that has one, {OFF}"
            )
