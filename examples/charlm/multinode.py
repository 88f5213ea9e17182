"""The language model on many nodes, sharded over all their ranks if asked to.

DDP_NNODES=2 pyflyte --config ... run --remote charlm/multinode.py charlm_multinode_wf --options '{"sharding": "full"}'
"""

from flytekit import task, workflow

from charlm.settings import Settings
from charlm.workflow import training
from flyte_ddp import RecipeOutputs, RunOptions
from flyte_ddp.flyte1.multinode import multinode


@task(**multinode(training.arguments()))
def train_charlm_multinode(settings: Settings, options: RunOptions) -> RecipeOutputs:
    return training.run_as_rank(settings, options)


@workflow
def charlm_multinode_wf(settings: Settings = Settings(), options: RunOptions = RunOptions()) -> RecipeOutputs:
    return train_charlm_multinode(settings=settings, options=options)
