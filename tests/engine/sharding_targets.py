"""What tests of sharding have ranks do."""

from typing import Any

from torch import distributed

from flyte_ddp.engine.block_cache import BlockCache
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.loop import evaluate
from flyte_ddp.engine.set_up import set_up
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group


class Counted:
    """Counts the bytes of whole tensors that one of torch's collectives exchanges, from now on."""

    def __init__(self, name: str, whole: str):
        self.bytes, self._call, self._whole = 0, getattr(distributed, name), whole
        setattr(distributed, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("output_tensor", "input_tensor"), args, strict=False)) | kwargs
        self.bytes += given[self._whole].nbytes
        return self._call(*args, **kwargs)


def count_exchanged(environment: Environment, link: Link, jobs: list[Job]) -> list[dict[str, int]]:
    """Of each job: the bytes of the weights and of the gradients in a step, and those of the weights in an evaluation
    of one batch."""
    found = []
    gathered, reduced = Counted("all_gather_single", "output_tensor"), Counted("reduce_scatter_single", "input")
    with process_group(environment, 60) as device:
        for job in jobs:
            parts = set_up(environment, device, job, BlockCache(environment))
            for counted in (gathered, reduced):
                counted.bytes = 0
            parts.state.train_step(next(parts.train.epoch(0)), False)
            counts = {"gathered": gathered.bytes, "reduced": reduced.bytes}
            evaluate(parts.state, parts.test, link)
            found.append({**counts, "evaluating": gathered.bytes - counts["gathered"]})
    return found
