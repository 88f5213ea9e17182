"""A rank of a training on many nodes, in a process that torchrun, or Flyte's Elastic plugin, has started."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from flyte_ddp.attempt.avoided import keep_away, noting_failure
from flyte_ddp.attempt.checkpoints import CheckpointStore, point_to_previous
from flyte_ddp.attempt.failures import platform_errors, to_failure
from flyte_ddp.attempt.logs import kept_logs
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.trained import Trained, train_by
from flyte_ddp.code.user_code import UserCode
from flyte_ddp.engine.job import Job, Subject, TrainingResult, make_job
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import (
    Environment,
    environment_from_torchrun,
    host_name,
    is_first_rank,
    visible_gpus,
)
from flyte_ddp.launch.failures import (
    LOSSES,
    Failure,
    PreemptedError,
    RankError,
    from_exception,
    from_exit_code,
    name_the_cause,
)
from flyte_ddp.launch.limits import memory_kills
from flyte_ddp.launch.link import DirectLink, Link
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.launch.watchdog import under_watchdog
from flyte_ddp.report.console import show_output
from flyte_ddp.settings import RunOptions, TrainingSettings

BESIDE = ".failure"
Train = Callable[[Environment, torch.device, Link, Job], TrainingResult]
StartRank = Callable[[Environment, Job, Callable[[Event], None] | None], list[TrainingResult]]


def train_as_rank(
    platform: Platform,
    settings: TrainingSettings,
    options: RunOptions,
    fetch: Callable[[], Subject],
    own_observers: Sequence[UserCode],
    start: StartRank,
    is_node: bool = False,
) -> Trained | None:
    """Train as one rank of many nodes, in a process for which torchrun's environment variables are set.

    `fetch` downloads the data to this host, and returns what is trained. `start` trains as this rank for (environment,
    job, on_event), and returns the results by rank; on_event is None on other ranks than 0. With is_node, `start` runs
    all ranks of this node, and is called in the process of the node's first rank alone. Rank 0 alone has observers, a
    report and the store of checkpoints. Returns what rank 0 has trained, and None on the other ranks.

    Raises:
        InputError: this is no rank of torchrun, or there are not as many ranks as registered.
        Exception: on a cluster, the platform's error for whatever ends the training.
    """
    show_output()  # the workflow file would do so, but Flyte's plugin gives a rank the task without importing it
    with recording_failure(platform), platform_errors(platform):
        if options.resume and is_first_rank():
            point_to_previous(platform)
        check_gpus(visible_gpus())
        asked = registration()
        environment = environment_from_torchrun(settings.backend, asked.node_range, asked.ranks_per_node)
        if is_node and environment.local_rank:
            return None
        one, number = "rank", environment.rank
        if is_node:
            one, number = "node", environment.rank // environment.world.local_size
        name = f"{one}-{number}"
        if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
            name += f"-restart-{restarts}"
        own = platform.working_folder() / name
        with kept_logs(platform, own, name, prefix=f"[{one} {number}] "):
            if environment.rank == 0:
                first = partial(start, environment)
                return train_by(platform, first, environment.world, fetch, options, own_observers, is_by_ranks=True)
            avoided = keep_away(platform, options.resume_from)
            job = dataclasses.replace(make_job(fetch(), options), avoided=avoided)
            if not platform.is_local():
                storage = CheckpointStore(platform, own / "checkpoint", platform.checkpoint_url())
                job = dataclasses.replace(job, storage=storage)
            with noting_failure(platform):
                start(environment, job, None)
        return None


@contextmanager
def recording_failure(platform: Platform) -> Iterator[None]:
    """Write the Failure of an exception that ends the block to a file, and raise the exception again.

    It is a context manager. failure_of_node reads the file, which is beside the one that torchrun names in
    TORCHELASTIC_ERROR_FILE; torchrun's own file has only the exception's text. Nothing is written without that
    variable, or for a KeyboardInterrupt or SystemExit. If the file cannot be written, that OSError is raised instead.

    Args:
        platform: the platform, which knows the errors of its downloads.
    """
    try:
        yield
    except Exception as error:
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(file + BESIDE).write_text(json.dumps(dataclasses.asdict(to_failure(platform, error))))
        raise


def run_rank(environment: Environment, link: DirectLink, job: Job, train: Train) -> list[TrainingResult]:
    """Join the ranks' process group, train as one of them, and return the results of all ranks, by rank.

    All ranks must call it: each one returns all results.

    Raises:
        PreemptedError: a rank was asked to stop by SIGTERM.
        RankError: the training has failed, in whatever way: the message names this rank. Or its subclass that is worth
            another attempt.
        InputError: the training cannot be done as asked.
    """
    timeouts = Timeouts.of(job.options)

    def work(store: Store) -> list[TrainingResult]:
        with process_group(environment, timeouts, store) as device:
            results: list[Any] = [None] * environment.world.size
            distributed.all_gather_object(results, train(environment, device, link, job))
            return results

    try:
        return under_watchdog(work, link, environment, timeouts, [signal.SIGTERM])
    except (StopRequested, PreemptedError) as stopped:
        message = f"rank {environment.rank} on {environment.host}: SIGTERM: {stopped}"
        raise PreemptedError(message, link.until) from None
    except RankError as error:  # the watchdog has named the rank
        if link.stop_requested and error.failure.kind in LOSSES:  # this node goes down
            message = f"rank {environment.rank} on {environment.host}: SIGTERM: {error}"
            raise PreemptedError(message, link.until) from None
        raise
    except Exception as error:
        raise name_the_cause([from_exception(error, environment.rank, environment.host)]) from error


def failure_of_node(failed: ChildFailedError) -> Failure:
    """Return the failure of the rank of this node that failed first.

    It is what recording_failure has written, or, for a killed rank, which writes nothing, made of the exit code.
    """
    rank, first = failed.get_first_failure()
    beside = Path(first.error_file + BESIDE)
    if beside.exists():
        return Failure(**json.loads(beside.read_text()))
    return from_exit_code(first.exitcode, rank, host_name())


def worth_restarts() -> Callable[[ChildFailedError], bool]:
    """Return a function that says whether torch's agent should start a node's ranks again after a failure.

    The function returns True if a rank was lost, unless the kernel has killed a process for want of memory since this
    call. It returns False if a rank hangs: that rank's agent may stand still, too, and the others would wait for it.
    """
    kills = memory_kills()
    return lambda failed: failure_of_node(failed).kind in LOSSES and memory_kills() == kills
