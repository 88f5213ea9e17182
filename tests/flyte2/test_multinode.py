"""Training on the nodes of a JobSet: what happens if one of them fails. test_sizes.py loses one."""

import json

import pytest
from flyte.clustered import ClusteredTaskEnvironment
from flyteidl2.core.execution_pb2 import ContainerError

from flyte_ddp.attempt.pod import HANDOVER_VARIABLE
from flyte_ddp.errors import InputError
from flyte_ddp.settings import RunOptions
from tests.flyte2.jobset import HP


@pytest.mark.slow
def test_the_failure_of_another_rank_is_the_one_that_flyte_hears_of(node, storage):
    handover = {HANDOVER_VARIABLE: "s3://bucket/run/main/actions/0"}
    first, second = (
        node(number, timeout_seconds=3, **handover, **other)
        for number, other in enumerate([{}, {"DDP_TRAINING_CODE": "yesterday's"}])
    )
    with first.running() as process, second.running() as other:
        assert (process.wait(250), other.wait(20)) == (1, 1), first.log
    assert first.error.error.kind == ContainerError.NON_RECOVERABLE
    assert "is not the code that was registered" in first.error.error.message
    left = json.loads(storage.objects["bucket/run/main/actions/0/failure.json"])
    assert left["recoverable"] is False, "so that it is not tried on other nodes"


def test_without_torchrun_a_rank_says_what_it_lacks(tasks):
    training = tasks.image_training
    with pytest.raises(InputError, match="WORLD_SIZE is not set: many nodes train under torchrun"):
        training.run_as_rank(HP, RunOptions(), None)


def test_the_jobset_is_as_registered(tasks):
    environment = tasks.training
    assert isinstance(environment, ClusteredTaskEnvironment)
    asked = environment.to_custom_dict()
    assert (asked["replicas"], asked["nprocPerNode"], asked["failurePolicy"]["maxRestarts"]) == (2, 1, 2)
    assert (environment.env_vars or {})["DDP_NPROC_PER_NODE"] == "1", "each rank reads the registration again"
