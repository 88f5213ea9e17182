"""What a node of a PyTorchJob reports of its ranks, and what one is registered as."""

import platform
import signal
import threading
from contextlib import suppress

import pytest
from flytekit.core.base_task import IgnoreOutputs
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteUserRuntimeException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from flyte_ddp.attempt import storage_folder
from flyte_ddp.attempt.checkpoints import checkpoint_store
from flyte_ddp.attempt.multinode import make_restart_rule, recording_failure
from flyte_ddp.attempt.registration import registration
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.flyte1 import platform as flytekit_platform
from flyte_ddp.flyte1.platform import TaskInterruptedError
from flyte_ddp.launch.environment import environment_from_torchrun, environment_from_variables
from flyte_ddp.launch.failures import Failure, RankError, from_exception, from_exit_code
from flyte_ddp.launch.watchdog import GRACE_SECONDS
from tests.attempt.test_checkpoints import on_a_cluster
from tests.attempt.test_webhook import Server
from tests.commands import pyflyte
from tests.pod import TWO_NODES, container_of, package

pytest.importorskip("flytekitplugins.kfpytorch", reason="needs flytekitplugins-kfpytorch")


@pytest.fixture
def in_a_pod(tmp_path):
    with on_a_cluster(SyncCheckpoint(str(tmp_path / "checkpoint")), tmp_path / "working"):
        yield


def reported_by_node(first):
    """What a node reports whose ranks have ended with this failure, as Flyte's plugin passes it on."""
    from flyte_ddp.flyte1.multinode import error_of_node  # needs the plugin

    try:
        raise FlyteUserRuntimeException(ValueError("what torchrun knows")) from ChildFailedError("ranks", {3: first})
    except FlyteUserRuntimeException as error:
        error.__context__ = error.__cause__
        return error_of_node(error)


def test_the_failure_of_a_rank_reaches_its_node_as_it_was(in_a_pod, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failure = Failure(3, "host", "error", "KeyError", "a: strange: message", "the stack", others=(4,))
    with pytest.raises(RankError), recording_failure(flytekit_platform):
        raise RankError(failure)
    (tmp_path / "error.json").write_text('{"message": "what torchrun knows"}')
    first = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    reported = reported_by_node(first)
    assert reported.failure == failure
    assert str(reported).startswith("ranks 3, 4 on host: KeyError: a: strange: message\nLogs: ")
    assert reported.timestamp == failure.at


def test_without_torchruns_agent_a_failure_stays_what_it_was(monkeypatch):
    for name in ("TORCHELASTIC_ERROR_FILE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"^WORLD_SIZE is not set: many nodes"), recording_failure(flytekit_platform):
        environment_from_variables("gloo")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("WORLD_SIZE", "0", "at least 1"),
        ("RANK", "2", "from 0 to 1"),
        ("RANK", "-1", "from 0 to 1"),
        ("LOCAL_WORLD_SIZE", "0", "at least 1"),
        ("LOCAL_RANK", "-1", "at least 0"),
        ("MASTER_PORT", "99999", "from 0 to 65535"),
        ("MASTER_PORT", "", "a whole number"),
    ],
)
def test_variables_that_no_launcher_sets_so_are_refused(monkeypatch, name, value, rule):
    sound = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for variable, text in {**sound, name: value}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(InputError, match=rf"^{name} must be {rule}, as torchrun sets it, got '{value}'$"):
        environment_from_variables("gloo")


def test_killed_rank_is_worth_a_retry(in_a_pod):
    reported = reported_by_node(ProcessFailure(local_rank=0, pid=1, exitcode=-signal.SIGKILL, error_file=""))
    assert isinstance(reported, TaskInterruptedError)
    assert str(reported).startswith(f"rank 3 on {platform.node()}: SIGKILL: probably out of memory\nLogs: ")


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        (from_exit_code(-signal.SIGKILL, 1, "host"), True),
        (from_exception(RuntimeError("[gloo/pair.cc:534] Connection closed by peer"), 1, "host"), True),
        (Failure(1, "host", "hang", "Hang", "no step"), False),
        (from_exception(NonFiniteError.in_step("loss", [1], 0, 0), 1, "host"), False),
        (from_exception(InputError("batch_size"), 1, "host"), False),
    ],
)
def test_only_lost_ranks_are_started_again_by_torchs_agent(tmp_path, monkeypatch, failure, again):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with suppress(RankError), recording_failure(flytekit_platform):
        raise RankError(failure)
    (tmp_path / "error.json").write_text('{"message": "what torchrun knows"}')
    first = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert make_restart_rule()(ChildFailedError("ranks", {1: first})) == again


def test_what_may_be_an_effect_of_another_nodes_failure_counts_as_later(tmp_path):
    failures = [Failure(0, "host", kind, "DistBackendError", "lost", at=100.0) for kind in ("peer", "error")]
    effect, cause = (flytekit_platform.error(failure, "lost") for failure in failures)
    assert cause.timestamp == 100.0
    assert effect.timestamp > cause.timestamp + GRACE_SECONDS


@pytest.mark.parametrize(
    ("error", "told"), [(IgnoreOutputs(), 0), (RendezvousError("gone"), 1), (FlyteUserRuntimeException(KeyError()), 1)]
)
def test_a_node_tells_the_webhook_unless_it_is_just_not_the_first(in_a_pod, monkeypatch, error, told):
    from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

    from flyte_ddp.flyte1.multinode import Multinode, MultinodeTask

    def execute(*_, **__):
        raise error

    monkeypatch.setattr(PytorchElasticFunctionTask, "execute", execute)
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DDP_WEBHOOK", f"{server.url}/200")
        with pytest.raises((FlyteException, IgnoreOutputs)):
            MultinodeTask(Multinode(), trains_nothing).execute()
        server.shutdown()
    assert len(server.posted) == told


def test_an_attempt_whose_nodes_do_not_meet_hands_on_where_the_checkpoint_is(tmp_path, monkeypatch):
    from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

    from flyte_ddp.flyte1.multinode import Multinode, MultinodeTask

    def execute(*_, **__):
        raise RendezvousError("the last node did not come")

    monkeypatch.setattr(PytorchElasticFunctionTask, "execute", execute)
    monkeypatch.setattr(storage_folder, "WAITS", ())
    folders = [tmp_path / str(attempt) for attempt in range(3)]
    folders[0].mkdir()
    (folders[0] / "checkpoint").write_text("half a training")
    pod = on_a_cluster(SyncCheckpoint(str(folders[1]), str(folders[0])), tmp_path / "first pod")
    with pod, pytest.raises(TaskInterruptedError, match="the last node did not come"):
        MultinodeTask(Multinode(), trains_nothing).execute()
    next_one = on_a_cluster(SyncCheckpoint(str(folders[2]), str(folders[1])), tmp_path / "second pod")
    with next_one, checkpoint_store(flytekit_platform, "key", resume=True) as store:
        assert store.path.read_text() == "half a training"


def trains_nothing() -> None:
    pass


@pytest.mark.parametrize(("world", "local"), [(1, 1), (6, 2), (4, 1)])
def test_other_world_than_registered_is_refused(monkeypatch, world, local):
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local, **there}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match="as registered"):
        environment_from_torchrun("gloo", (2, 2), 2)


def test_range_of_nodes(monkeypatch):
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in {"RANK": 5, "WORLD_SIZE": 6, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, **there}.items():
        monkeypatch.setenv(name, str(value))
    environment = environment_from_torchrun("gloo", (2, 4), 2)
    assert (environment.rank, environment.world.size, environment.world.local_size) == (5, 6, 2)


def test_no_world_at_all_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InputError, match="PyTorchJob"):
        environment_from_torchrun("gloo", (2, 2), 2)


@pytest.mark.slow
def test_registered_as_a_pytorchjob():
    task = package(**TWO_NODES).tasks["workflows.multinode.pytorch_multinode_task"]
    assert task.type == "pytorch"
    elastic = task.custom["elasticConfig"]
    assert (elastic["minReplicas"], elastic["maxReplicas"], elastic["nprocPerNode"]) == (2, 2, 1)
    policy = task.custom["runPolicy"]["cleanPodPolicy"]
    assert policy == "CLEANPOD_POLICY_RUNNING", "or the others keep their GPUs while they wait for a lost node"
    baked = {variable.key: variable.value for variable in container_of(task).env}
    assert TWO_NODES.items() <= baked.items(), "each pod imports the file anew and has to come to the same numbers"
    assert list(task.metadata.cache_ignore_input_vars) == ["options"]


@pytest.mark.parametrize("value", ["1", "two", "3:2", "0:2"])
def test_wrong_numbers_of_nodes_are_refused(monkeypatch, value):
    monkeypatch.setenv("DDP_NNODES", value)
    with pytest.raises(InputError, match="DDP_NNODES"):
        registration().node_range  # noqa: B018


def test_local_run_is_refused_at_once():
    assert "many nodes need a cluster" in pyflyte("workflows/multinode.py", "pytorch_multinode_wf", status=2).stderr
