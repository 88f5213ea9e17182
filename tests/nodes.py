"""Pods of two nodes that meet on this machine, with the variables that Kubeflow's operator sets."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flyteidl.core.literals_pb2 import Literal

from tests.commands import free_port
from tests.pod import PATIENCE_SECONDS, Pod


def meeting(folder: Path) -> Callable[..., Pod]:
    """A function that makes a node's pod; all that it makes meet."""
    kubeflow = {
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "FLYTE_INTERNAL_EXECUTION_ID": folder.name,
    }

    def make(
        name: str,
        task: Any,
        inputs: dict[str, Literal],
        checkpoints: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Pod:
        (folder / f"{name}-tmp").mkdir()
        environment = {**kubeflow, "TMPDIR": str(folder / f"{name}-tmp"), **(environment or {})}
        return Pod(task, inputs, folder / name, environment=environment, checkpoints=checkpoints, cores=1)

    return make


def weights(outputs: Mapping[str, Literal]) -> Any:
    return torch.load(outputs["model_state"].scalar.blob.uri, weights_only=True)


def listens(pod: Pod) -> bool:
    """Whether the first node has made the meeting place; as in a PyTorchJob, that is always the same one."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(pod.environment["PET_RDZV_ENDPOINT"].rpartition(":")[2]))) == 0


def lose_one(
    make: Callable[..., Pod], checkpoints: Path, reached: Callable[[], bool], has_address: bool
) -> tuple[Pod, Pod, Pod]:
    """Runs two nodes to their end, the second of which is killed once it has reached something, and comes back.

    has_address: whether the first has one of its own, which makes it the place where both meet.
    Returns the first one, the lost one, and the one that had the outputs in the end.
    """
    first = make("a", checkpoints=checkpoints)
    with first.running() as process:
        if not has_address:  # or the second could make the meeting place, too
            first.wait_until(lambda: listens(first), process)
        lost = make("b", checkpoints=checkpoints)
        lost.kill_when(reached)
        again = make("b-again", checkpoints=checkpoints)
        with again.running() as other:
            assert (process.wait(PATIENCE_SECONDS), other.wait(PATIENCE_SECONDS)) == (0, 0), first.log + again.log
    done = first if first.outputs_file.exists() else again
    assert "resuming from the checkpoint" in done.log, done.log
    return first, lost, done
