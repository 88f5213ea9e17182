"""The choice of how the ranks take a step together, by how the network is trained."""

from flyte_ddp.engine.sharding.sharding import ShardedStep, is_sharded
from flyte_ddp.engine.step import ReplicatedStep, SingleStep, Step
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep


def make_parallel(step: Step, virtual_ranks: int, has_unused: bool) -> SingleStep:
    if is_sharded(step.model):
        return ShardedStep(step, has_unused)
    if virtual_ranks:
        return ExactStep(step, virtual_ranks)
    return ReplicatedStep(step, has_unused) if step.world_size > 1 else SingleStep(step)
