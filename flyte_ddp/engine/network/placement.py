"""The placement of a network: whole on a rank's device, or sharded over all ranks."""

from torch import nn

from flyte_ddp.engine.average import Average
from flyte_ddp.engine.collectives import broadcast_value
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
    """Move the network to the device, or shard it over all ranks if options.sharding is not "off".

    Sharding is a collective; moving is not.

    Args:
        recipe: has the device, and the decay of the weights' moving average.
        model: the network, which is changed in place.
        base: the network's frozen weights. With sharding, base.digest is set to rank 0's, because rank 0 alone has
            their values.
        options: how to shard it, if at all.
        environment: this rank's place among all ranks.
        precision: "float32" or "bfloat16", which the network is trained in. Only sharding uses it.

    Returns:
        The moving average of the weights, placed like the network; None if the recipe has none.

    Raises:
        InputError: The recipe, an option or a weight does not go with sharding.
    """
    virtual_ranks = recipe.settings.virtual_ranks
    if options.sharding != "off":
        check_recipe(recipe, options, environment, precision)
        check_weights(recipe, model)
    if options.sharding == "off" or (virtual_ranks and environment.world.size == 1):  # the same bits with less work
        model.to(recipe.device)
        return Average(model, recipe.ema_decay) if recipe.ema_decay else None
    base.digest = broadcast_value(base.digest if environment.rank == 0 else "")  # the others have no values
    average = Average(model, recipe.ema_decay) if recipe.ema_decay else None
    mesh = make_mesh(options, environment)
    # With virtual ranks, the step adds up the whole numbers of all nodes, which torch would add up as floats
    mesh = mesh["ranks"] if virtual_ranks else mesh
    shard(recipe, [model, average.model] if average else [model], mesh, precision)
    return average
