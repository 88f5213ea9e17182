"""A check that all ranks have been started for the same training.

Other launchers start each host's ranks separately.
"""

import torch

from flyte_ddp.engine.checkpoints.checkpoint import compare_identities
from flyte_ddp.engine.collectives import broadcast_value, gather_values
from flyte_ddp.engine.job import Job
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment

# Options that decide which collectives ranks call, keep_checkpoint where a network is sharded
OPTIONS = ("sharding", "compile", "audit_every", "trace_every", "odd_hosts", "keep_best", "keep_checkpoint")


def check_same_training(environment: Environment, job: Job) -> None:
    """Check that all ranks have rank 0's settings, code, data, initial weights, and options in OPTIONS; a collective.

    On a rank with another version of torch, the code is not compared, because the code's version contains torch's.

    Raises:
        InputError: A rank differs from rank 0. All ranks raise it. The message names the first such rank and its host.
    """
    own = {**job.identity, **{name: getattr(job.options, name) for name in OPTIONS}, "torch": str(torch.__version__)}
    first = broadcast_value(own)
    if first["torch"] != own["torch"]:
        first.update(code=own["code"], torch=own["torch"])
    found = next(compare_identities(first, own), None)
    for rank, (host, difference) in enumerate(gather_values((environment.host, found))):
        if difference:
            (*_, name), usual, other = difference
            raise InputError(
                f"{name} must be the same on all ranks, got {usual!r} on rank 0 and {other!r} on rank {rank} on "
                f"{host}: start the ranks of all hosts by the same command, with the same files and data"
            )
