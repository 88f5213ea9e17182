"""Where a network is: whole on a rank's device, or sharded over all ranks."""

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
    """Move the network to the device, or shard it; returns its average, if there is one, at the same place.

    A collective; InputError for what cannot be sharded. precision: of training, float32 or bfloat16.
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
