"""The placement of a network: whole on a rank's device, or sharded over all ranks."""

from torch import distributed, nn

from flyte_ddp.engine.average import Average
from flyte_ddp.engine.sharding.mesh import make_mesh
from flyte_ddp.engine.sharding.shardable import check_recipe, check_weights
from flyte_ddp.engine.sharding.sharding import shard
from flyte_ddp.launch.environment import Environment
from flyte_ddp.model_files.frozen_base import FrozenBase
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions


def to_device(
    recipe: Recipe,
    model: nn.Module,
    base: FrozenBase,
    options: RunOptions,
    environment: Environment,
    precision: str = "float32",
) -> Average | None:
    """Move the network to the device, or shard it; a collective.

    Args:
        recipe: says where, and which average.
        model: the network.
        base: the network's frozen weights.
        options: how to shard it, if at all.
        environment: this rank's place among all ranks.
        precision: that of training, float32 or bfloat16.

    Returns:
        The network's average, if there is one, at the same place.

    Raises:
        InputError: The network cannot be sharded.
    """
    if options.sharding == "off":
        model.to(recipe.device)
        return Average(model, recipe.ema_decay) if recipe.ema_decay else None
    check_recipe(recipe, options, environment)
    check_weights(recipe, model)
    digests = [base.digest if environment.rank == 0 else ""]  # of whole weights, with their values
    distributed.broadcast_object_list(digests)
    base.digest = digests[0]
    average = Average(model, recipe.ema_decay) if recipe.ema_decay else None
    mesh = make_mesh(options, environment)
    shard(recipe, [model, average.model] if average else [model], mesh, precision)
    return average
