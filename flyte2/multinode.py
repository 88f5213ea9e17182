"""MNIST on many nodes under Flyte 2: a JobSet of Kubernetes, each of whose pods runs torchrun.

DDP_NNODES=4 flyte run flyte2/multinode.py main --hp '{"epochs": 1}'

DDP_NNODES=8,4,2 trains on fewer nodes if the cluster has not got eight.
"""

from flyte.io import Dir, File

from flyte2.mnist import preparation, prepare
from flyte_ddp.flyte2.data import by_content
from flyte_ddp.flyte2.environment import clustered, workflow_environment
from flyte_ddp.flyte2.prepare import resolve_for_multinode
from flyte_ddp.flyte2.sizes import on_available_nodes
from flyte_ddp.flyte2.train import TrainingOutputs, image_training
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

training = image_training.environment("multinode_training", **clustered())
workflow = workflow_environment("multinode", preparation, training)


@training.task(**image_training.arguments())
async def train(
    hp: Hyperparameters, data: Dir, options: RunOptions, init: File | None = None
) -> TrainingOutputs | None:
    """Train hp.model on the prepared dataset on all nodes. Each rank runs this function; rank 0 returns the outputs."""
    return image_training.run_as_rank(hp, options, data, init)


@workflow.task
async def main(
    hp: Hyperparameters = Hyperparameters(), options: RunOptions = RunOptions(), init: File | None = None
) -> TrainingOutputs:
    """Train as flyte2/mnist.py does, on many nodes."""
    data = await prepare(resolve_for_multinode(hp))
    outputs: TrainingOutputs = await on_available_nodes(train, hp, data, options, by_content(init))
    return outputs
