"""A training by one of the ranks that torchrun or a cluster's scheduler has started."""

import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import check_ranks, environment_from_variables
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.launch.signals import STOP_SIGNALS
from flyte_ddp.launch.watchdog import under_watchdog

SETTLE_SECONDS = 0.1


@record  # so that torchrun's report has the error of the rank that failed first
def join_and_train(job: Job, on_event: Callable[[Event], None]) -> TrainingResult:
    """Join the ranks that torchrun has started, train as one of them, and return the result as this rank knows it.

    Every rank calls this in its main thread. The environment variables RANK, WORLD_SIZE and so on say which rank it is.
    If a rank hangs or is lost, the call raises an error, and the process may later end with status 1, because the
    thread that trains is left behind. The call sets handlers of stop signals, which stay.

    Args:
        job: the job, the same on all ranks.
        on_event: is called on rank 0 with each event; not called on other ranks.

    Raises:
        InputError: There are more ranks than can share a batch.
        PreemptedError: A signal asked the rank to stop. The rank has written a checkpoint before if it could.
        RankError: Another rank is lost, or a rank has been silent for too long.
        Exception: What else worker.train() raises.
    """
    settings = job.settings
    environment = environment_from_variables(settings.backend)
    check_ranks(environment.world.size, settings.batch_size, settings.virtual_ranks)
    link = DirectLink(on_event if environment.rank == 0 else None)
    timeouts = Timeouts.of(job.options)

    def work(store: Store) -> TrainingResult:
        with process_group(environment, timeouts, store) as device:
            result = worker.train(environment, device, link, job)
        # This gives gloo's thread the interpreter's lock, which it needs to drop the tensors of the last collective. If
        # the interpreter ends meanwhile, torch aborts the process (torch 2.15, c10d::ProcessGroupGloo::runLoop)
        time.sleep(SETTLE_SECONDS)
        return result

    try:
        return under_watchdog(work, link, environment, timeouts, STOP_SIGNALS)
    except (StopRequested, PreemptedError) as stopped:
        raise PreemptedError(f"rank {environment.rank} on {environment.host}: {stopped}") from None
