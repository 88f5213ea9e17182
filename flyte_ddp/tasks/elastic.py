"""One rank of a training on many nodes, in a process that Flyte's Elastic plugin (torchrun inside) has started."""

import dataclasses
import hashlib
import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from flytekit import FlyteContextManager, current_context
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from flyte_ddp.engine import worker
from flyte_ddp.engine.job import Job, Subject, TrainingResult, job_of
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import Event
from flyte_ddp.launch.environment import Environment, environment_from_torchrun, visible_gpus
from flyte_ddp.launch.failures import Failure, PreemptedError, from_exception, from_exit_code, name_the_cause
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import show_output
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.tasks.execution import TaskError, failure_of, flyte_retries, task_error
from flyte_ddp.tasks.logs import kept_logs, url_of_logs
from flyte_ddp.tasks.registration import registration
from flyte_ddp.tasks.resources import check_gpus
from flyte_ddp.tasks.train import Trained, TrainingOutputs, image_subject, outputs_of, train_by
from flyte_ddp.user_code import UserCode

GRACE_SECONDS = 5.0  # lets the rank that caused a failure be the first to report it
BESIDE = ".failure"


def train_rank(
    hp: Hyperparameters, data: FlyteDirectory, options: RunOptions, init: FlyteFile | None = None
) -> TrainingOutputs | None:
    """Trains an image classifier as one rank of many nodes; see train_as_rank."""

    def fetch() -> Subject:
        return image_subject(hp, download_once(data), None if init is None else download_once(init))

    return train_as_rank(hp, options, fetch, outputs_of)


@contextmanager
def handing_on_failure() -> Iterator[None]:
    """Leaves the failure of a rank beside torchrun's file of its error, which has only the text."""
    try:
        yield
    except Exception as error:
        beside = Path(os.environ["TORCHELASTIC_ERROR_FILE"] + BESIDE)
        beside.write_text(json.dumps(dataclasses.asdict(failure_of(error))))
        raise


@handing_on_failure()
@flyte_retries()
def train_as_rank(
    settings: TrainingSettings,
    options: RunOptions,
    fetch: Callable[[], Subject],
    outputs_of: Callable[[Trained], Any],
    own_observers: Sequence[UserCode] = (),
) -> Any:
    """Trains as one rank; returns the outputs on rank 0, which alone has observers and checkpoints, else None."""
    show_output()  # Flyte's plugin hands a rank the task by its code, so that the workflow file is not imported
    asked = registration()
    check_gpus(visible_gpus())
    environment = environment_from_torchrun(settings.backend, asked.node_range, asked.ranks_per_node)
    name = f"rank-{environment.rank}"
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        name += f"-restart-{restarts}"
    own = Path(current_context().working_directory, name)
    with kept_logs(own, name, prefix=f"[rank {environment.rank}] "):
        if environment.rank == 0:

            def start(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
                return run_rank(environment, DirectLink(on_event), job)

            outputs = outputs_of(train_by(start, environment.world, fetch, options, own_observers))
            # The plugin pickles the outputs; PythonPickledFile, a class that flytekit makes on use, cannot be pickled
            return outputs._replace(model_state=FlyteFile(outputs.model_state.path))
        run_rank(environment, DirectLink(None), job_of(fetch(), options))
    return None


def run_rank(environment: Environment, link: DirectLink, job: Job) -> list[TrainingResult]:
    """The results of all ranks; raises RankError, or its recoverable kind, naming this rank; or its InputError."""
    signal.signal(signal.SIGTERM, link.on_signal)
    try:
        with process_group(environment, job.options.timeout_seconds) as device:
            results: list[Any] = [None] * environment.world.size
            distributed.all_gather_object(results, worker.train(environment, device, link, job))
            return results
    except StopRequested as stopped:
        raise PreemptedError(f"rank {environment.rank} on {environment.host}: SIGTERM: {stopped}") from None
    except Exception as error:
        failure = from_exception(error, environment.rank, environment.host)
        if failure.kind == "peer":
            time.sleep(GRACE_SECONDS)
        raise name_the_cause([failure]) from error


def error_of_node(failed: ChildFailedError) -> TaskError:
    """The first failure of a node's ranks, without torchrun's banner."""
    rank, first = failed.get_first_failure()
    beside, at = Path(first.error_file + BESIDE), first.timestamp
    if beside.exists():
        failure = Failure(**json.loads(beside.read_text()))
    else:  # it was killed
        failure = from_exit_code(first.exitcode, rank, platform.node())
    if failure.is_effect:
        at += int(GRACE_SECONDS)  # Flyte shows the earliest of all nodes' failures
    return task_error(failure, url_of_logs(), at)


def download_once(data: FlyteFile | FlyteDirectory) -> Path:
    """A copy of the file or folder that all ranks of this host share; the first one to ask downloads it."""
    source = str(data.remote_source or data.path)
    name = Path(source).name if isinstance(data, FlyteFile) else ""
    folder = Path(tempfile.gettempdir(), f"dataset-{hashlib.sha256(source.encode()).hexdigest()[:16]}")
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
            storage = FlyteContextManager.current_context().file_access
            storage.get_data(source, str(beside / name), is_multipart=isinstance(data, FlyteDirectory))
            os.rename(beside, folder)
    return folder / name
