"""The placement of a network: whole on a rank's device, or sharded over all ranks."""

import importlib.util

import torch
from torch import nn

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.attributes import matching_layers
from flyte_ddp.engine.average import Average
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.collectives import broadcast_value
from flyte_ddp.engine.sharding.mesh import make_mesh
from flyte_ddp.engine.sharding.sharding import OFF, shard
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.launch.environment import Environment
from flyte_ddp.model_files.frozen_base import FrozenBase
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions

ALIGNMENT = 64  # bytes, of which torch's allocator on a CPU begins each tensor at a multiple


def to_device(
    recipe: Recipe,
    model: nn.Module,
    base: FrozenBase,
    options: RunOptions,
    environment: Environment,
    precision: str = "float32",
) -> Average | None:
    """Move the network to the device, or shard it over all ranks; a collective with sharding.

    - If options.sharding is "off", the network is moved to this rank's device.
    - Otherwise it is sharded, and all ranks get rank 0's weights and buffers.
    - If sharding is on with virtual ranks, but there is only one rank, the network is checked as for sharding, and then
      only moved.

    Args:
        recipe: the recipe.
        model: the network, which is changed in place. With sharding, its tensors may be on torch's meta device on ranks
            other than 0.
        base: the frozen weights that checkpoints leave out. With sharding, base.digest is set to rank 0's, since the
            other ranks do not have the values of these weights.
        options: the options.
        environment: this rank and its ranks.
        precision: the precision of the training, "float32" or "bfloat16"; used with sharding alone.

    Returns:
        The moving average of the weights, placed like the network; None if recipe.ema_decay is 0.

    Raises:
        InputError: The recipe, an option, a weight or the numbers of ranks on the nodes do not go with sharding.
    """
    virtual_ranks = recipe.settings.virtual_ranks
    if options.sharding != "off":
        _check_recipe(recipe, options, environment, precision)
        _check_weights(recipe, model)
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


# --- refusals of what cannot be sharded, or not yet ---


def _check_recipe(recipe: Recipe, options: RunOptions, environment: Environment, precision: str) -> None:
    """Raise InputError if a recipe, an option or the environment does not go with sharding.

    Refused are a torch that is too old, missing safetensors, GPUs with another backend than nccl,
    options.log_gradients, and a recipe without fsdp_units or with micro_batch = -1. With virtual ranks, three more are
    refused, because the bits would differ from those without sharding: another precision than float32, a micro_batch
    smaller than a part, and hybrid sharding on nodes of 1 rank. The network need not be built yet.
    """
    from torch.distributed.fsdp import FSDPModule  # this import is slow, and only sharding needs it

    owner = type(recipe).__name__
    world = environment.world
    reduces_unused = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    has_safetensors = importlib.util.find_spec("safetensors") is not None
    on_gpus_by_gloo = world.device == "cuda" and world.backend != "nccl"
    virtual_ranks = recipe.settings.virtual_ranks
    both = "with virtual_ranks and sharding together"
    part = -(-recipe.settings.batch_size // max(1, virtual_ranks))  # samples, at most
    has_copies_alone = options.sharding == "hybrid" and world.local_size == 1 < world.size
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
        (virtual_ranks and precision != "float32", f"precision must be float32 {both}, got {precision}: set it so"),
        (
            virtual_ranks and 0 < recipe.micro_batch < part,
            (
                f"{owner}.micro_batch must be 0 or at least {part}, the samples of a part, {both}, got "
                f"{recipe.micro_batch}: set it to 0 and raise virtual_ranks, which makes parts smaller"
            ),
        ),
        (
            virtual_ranks and has_copies_alone,
            "options.sharding must be full with virtual_ranks on nodes of 1 rank, got hybrid: set it so",
        ),
    ):
        if is_refused:
            raise InputError(f"{problem}, {OFF}")


def _check_weights(recipe: Recipe, model: nn.Module) -> None:
    """Raise InputError for a weight that cannot be sharded.

    Refused is a weight without dimensions, with a hook on its gradient, or tied to a weight of another layer in
    fsdp_units. With virtual ranks, a weight or buffer is also refused if it is not contiguous or, on a CPU, not aligned
    in memory.
    """
    where = code_location(recipe, "model")
    if recipe.settings.virtual_ranks:
        _check_memory(model, where, recipe.device.type == "cpu")
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


def _check_memory(model: nn.Module, where: str, is_on_cpu: bool) -> None:
    """Raise InputError if a weight or buffer is not contiguous or, on a CPU, not aligned in memory.

    Sharding makes tensors contiguous and aligned. Kernels may round otherwise for other tensors, so results with and
    without sharding might differ.

    Args:
        model: the network. Tensors on torch's meta device have no place in memory, and count as aligned.
        where: the place in the user's code, for the message.
        is_on_cpu: whether the training computes on a CPU.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_placed = not is_on_cpu or tensor.is_meta or tensor.data_ptr() % ALIGNMENT == 0
        if not (tensor.is_contiguous() and is_placed):
            raise InputError(
                f"{where}: {name} must be contiguous and begin at a multiple of {ALIGNMENT} bytes in memory with "
                f"virtual_ranks and sharding together, got strides {tensor.stride()}: let {name}.data be "
                f"{name}.data.clone(memory_format=torch.contiguous_format), {OFF}"
            )
