"""A rank of a training on many nodes, in a process that torchrun, or Flyte's Elastic plugin, has started."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from flyte_ddp.attempt.avoided import keep_away, listing_bad_nodes
from flyte_ddp.attempt.checkpoints import CheckpointStore, point_to_previous
from flyte_ddp.attempt.failures import platform_errors, to_failure
from flyte_ddp.attempt.logs import kept_logs
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.trained import Trained, train_by
from flyte_ddp.code.user_code import UserCode
from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.job import Job, Subject, TrainingResult, make_job
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import Environment, environment_from_torchrun, host_name, is_first_rank
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
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.launch.watchdog import under_watchdog
from flyte_ddp.report.console import show_output
from flyte_ddp.settings import RunOptions, TrainingSettings

BESIDE = ".failure"
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

    All ranks call it. Rank 0 alone has observers and a report, and fetches the checkpoint to resume from. Each rank
    writes a log, and uploads it on a cluster. If the training fails, failure_of_node() can read why.

    Args:
        platform: the platform.
        settings: what determines the result.
        options: how to run the training.
        fetch: downloads the data to this host, and returns what is trained. Each rank calls it; with is_node the first
            rank of each node.
        own_observers: the user's observers.
        start: start(environment, job, on_event) trains as this rank, and returns the results by rank. on_event is None
            on other ranks than 0.
        is_node: whether `start` runs all ranks of this node. Then only the first rank of each node calls `start`; the
            node's other ranks return None at once.

    Returns:
        What was trained, on rank 0; None on the other ranks.

    Raises:
        InputError: This is no rank of torchrun, or there are not as many ranks as registered.
        Exception: What ends the training; on a cluster, as the platform's error.
    """
    show_output()  # the workflow file would do so, but Flyte's plugin gives a rank the task without importing it
    with recording_failure(platform), platform_errors(platform):
        if options.resume and is_first_rank():
            point_to_previous(platform)
        check_gpus()
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
            with listing_bad_nodes(platform):
                start(environment, job, None)
        return None


@contextmanager
def recording_failure(platform: Platform) -> Iterator[None]:
    """Write a rank's failure to a file if an exception ends the block, and raise the exception again.

    A context manager. The file lies beside torchrun's own, which the variable TORCHELASTIC_ERROR_FILE names, and
    failure_of_node() reads it. Nothing is written without that variable, or for a KeyboardInterrupt or SystemExit. If
    the file cannot be written, an OSError is raised in place of the exception.

    Args:
        platform: the platform, which knows the errors of its downloads.
    """
    try:
        yield
    except Exception as error:
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun writes only the exception's text there
            Path(file + BESIDE).write_text(json.dumps(dataclasses.asdict(to_failure(platform, error))))
        raise


def run_rank(
    worker: str, environment: Environment, job: Job, on_event: Callable[[Event], None] | None
) -> list[TrainingResult]:
    """Join the ranks' process group, train as this rank, and return the results of all ranks, by rank.

    A collective: all ranks must call it, each in its main thread, and each one returns all results. The handler that it
    sets for SIGTERM stays after the call.

    Args:
        worker: the name of the module whose function train trains as one rank.
        environment: this rank.
        job: the training.
        on_event: is called with each event, on rank 0; None on other ranks.

    Raises:
        PreemptedError: A rank was asked to stop by SIGTERM.
        InputError: The training cannot be done as asked.
        RankError: The training has failed for any other reason. The message names the rank. A RecoverableRankError,
            which is a subclass, is worth another attempt.
    """
    timeouts = Timeouts.of(job.options)
    link = DirectLink(on_event)

    def work(store: Store) -> list[TrainingResult]:
        with process_group(environment, timeouts, store) as device:
            return gather_values(import_module(worker).train(environment, device, link, job))

    try:
        return under_watchdog(work, link, environment, timeouts, [signal.SIGTERM])
    except (StopRequested, PreemptedError) as stopped:
        cause = "SIGTERM" if link.stop_requested else "another rank got a SIGTERM"
        message = f"rank {environment.rank} on {environment.host}: {cause}: {stopped}"
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

    The context manager recording_failure has written the failure to a file. A killed rank writes no file: then the
    failure is made from the rank's exit code.

    Args:
        failed: the error of torch's elastic agent, which names the failed ranks of this node.
    """
    rank, first = failed.get_first_failure()
    beside = Path(first.error_file + BESIDE)
    if beside.exists():
        return Failure(**json.loads(beside.read_text()))
    return from_exit_code(first.exitcode, rank, host_name())


def make_restart_rule() -> Callable[[ChildFailedError], bool]:
    """Return a function that says whether torch's agent should start a node's ranks again after a failure.

    The function gets the agent's ChildFailedError. It returns True if a rank was killed or has lost its peers. It
    returns False for an error of the ranks' code, for a hang, and if the kernel has killed a process for want of memory
    since make_restart_rule() was called.
    """
    kills = memory_kills()
    # After a hang, another node's agent may stand still, too
    return lambda failed: failure_of_node(failed).kind in LOSSES and memory_kills() == kills
