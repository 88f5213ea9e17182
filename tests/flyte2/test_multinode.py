"""Training on the nodes of a JobSet: what happens if one of them is lost, or fails."""

import json

import pytest
from flyte.clustered import ClusteredTaskEnvironment
from flyteidl2.core.execution_pb2 import ContainerError

from flyte_ddp.attempt.pod import HANDOVER_VARIABLE
from flyte_ddp.errors import InputError
from flyte_ddp.settings import RunOptions
from tests.commands import same
from tests.flyte2.jobset import HP
from tests.flyte2.pod import weights

CHECKPOINT = "bucket/run/nodes/1/_flytecheckpoints/checkpoint"


@pytest.mark.slow
def test_a_lost_node_restarts_all_and_they_go_on_where_they_were(node, storage, whole):
    """The node where all meet: test_sizes.py loses the other one."""
    lost, other = (node(number, rendezvous="c10d") for number in range(2))
    with other.running() as process:
        lost.kill_when(lambda objects: CHECKPOINT in objects)
        assert process.wait(120) == 1, "the JobSet's controller starts all pods again"
    first, second = (node(number, restart=1, rendezvous="c10d") for number in range(2))
    with first.running() as process, second.running() as other:
        assert process.wait(200) == other.wait(20) == 0, first.log + second.log
    assert "resuming from the checkpoint" in first.log + second.log
    assert same(weights(storage, first.outputs()), whole(2, epochs=4, threads=1).weights)
    survivors = [f"bucket/run/nodes/1/logs/rank-{rank}.log" for rank in (0, 1)]
    assert any(name in storage.objects for name in survivors), "of the ranks before the restart"
    assert "bucket/run/nodes/1/restart-1/logs/rank-1.log" in storage.objects


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
