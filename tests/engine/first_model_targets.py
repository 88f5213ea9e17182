"""What tests of the first network have ranks do."""

from typing import Any

from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import load_recipe
from flyte_ddp.engine.network.first_model import first_model
from flyte_ddp.engine.network.placement import to_device
from flyte_ddp.engine.sharding.sharding import local
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.model_files.frozen_base import FrozenBase


def place_each(environment: Environment, link: Link, jobs: list[Job]) -> list[dict[str, Any]]:
    """Of each job: which tensors of the network had no values, what was remarked, and what the rank has in the end.

    Of a job whose network is refused: the error.
    """
    found: list[dict[str, Any]] = []
    with process_group(environment, 60) as device:
        for job in jobs:
            recipe = load_recipe(job, device)
            try:
                model, left_out, remarks = first_model(recipe, job)
            except InputError as error:
                found.append({"error": error.message})
                continue
            without = {name for name, tensor in _named(model) if tensor.is_meta}
            base = FrozenBase(model, left_out)
            average = to_device(recipe, model, base, job.options, environment)
            assert average
            networks = {"model": model, "average": average.model}
            found.append({
                "without": without,
                "remarks": remarks,
                "base": (base.names, base.digest),
                "trained": {name for name, weight in model.named_parameters() if weight.requires_grad},
                "tied": model.get_parameter("3.weight") is model.get_parameter("0.weight"),
                **{of: {name: local(t).tolist() for name, t in _named(one)} for of, one in networks.items()},
            })  # fmt: skip
    return found


def _named(network: Any) -> list[Any]:
    return [*network.named_parameters(), *network.named_buffers()]
