"""The rules of a training by virtual ranks, and a remark on the cost of uneven parts."""

from flyte_ddp.engine.batches.batches import parts_of_rank
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import check_ranks
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import RunOptions, TrainingSettings

OFF = "set virtual_ranks to 0"


def check_settings(settings: TrainingSettings, options: RunOptions, world_size: int) -> None:
    """Raise InputError if settings and options cannot go together on this number of ranks.

    There may be at most as many ranks as virtual ranks or, without virtual ranks, as samples in a batch. audit_every
    needs virtual ranks. trace_every excludes sharding and compile. Virtual ranks and sharding together exclude
    audit_every and compile.

    Args:
        settings: the settings of the training.
        options: the options of the run.
        world_size: the number of ranks.
    """
    check_ranks(world_size, settings.batch_size, settings.virtual_ranks)
    if options.audit_every and not settings.virtual_ranks:
        raise InputError(
            f"audit_every must be 0 without virtual_ranks, since others may then round otherwise, got "
            f"{options.audit_every}: set virtual_ranks, or leave audit_every out"
        )
    for name, reason in (("sharding", "shares out gradients"), ("compile", "leaves no layers")):
        value = getattr(options, name)
        if options.trace_every and value not in ("off", False):
            raise InputError(
                f"trace_every must be 0 with {name}, which {reason}, got {options.trace_every}: set options.{name} to "
                f"{'off' if name == 'sharding' else 'false'}, or leave trace_every out"
            )
    if settings.virtual_ranks and options.sharding != "off":
        for name in ("audit_every", "compile"):
            value = getattr(options, name)
            if value:
                raise InputError(
                    f"{name} must be {type(value)()} with virtual_ranks and sharding together, got {value}: leave it "
                    f"out, set options.sharding to off, or {OFF}"
                )


def check_recipe(recipe: Recipe) -> None:
    """Raise InputError if micro_batch is -1 with virtual ranks: a machine's memory would decide the result."""
    virtual_ranks = recipe.settings.virtual_ranks
    owner = type(recipe).__name__
    if virtual_ranks and recipe.micro_batch == -1:
        raise InputError(
            f"virtual_ranks must be 0 for {owner}, whose micro_batch of -1 goes by what fits into memory, got "
            f"{virtual_ranks}: give micro_batch a number, or {OFF}"
        )


def uneven_parts(virtual_ranks: int, world_size: int) -> list[str]:
    """Return a remark in a list if some ranks compute more parts of a batch than others; otherwise an empty list.

    The remark says by how much a step gets slower, since all ranks wait for those with most parts, and names better
    numbers of ranks.

    Args:
        virtual_ranks: the number of parts of a batch; 0 without virtual ranks.
        world_size: the number of ranks, at most virtual_ranks unless that is 0.
    """
    if virtual_ranks % world_size == 0:
        return []
    most = len(parts_of_rank(virtual_ranks, world_size - 1, world_size))
    even = virtual_ranks / world_size
    divisors = [count for count in range(1, virtual_ranks + 1) if virtual_ranks % count == 0]
    fewer = max(one for one in divisors if one < world_size)
    more = min(one for one in divisors if one > world_size)
    remark = (
        f"virtual_ranks: {world_size} ranks compute {virtual_ranks} parts of a batch, so that a step takes as long as "
        f"{most} of them, {most / even:.2f} times as long as if they went evenly: train on {more} or {fewer} ranks, by "
        f"nproc, or set virtual_ranks to a multiple of {world_size}, which changes the result"
    )
    return [remark]
