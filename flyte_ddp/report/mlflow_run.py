"""An MLflow run, owned by the parent: one run, whatever the number of ranks and attempts.

It has a client of its own, because MLflow's global run, experiment and address belong to the user.
"""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.events import Observer
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.report.background import Background, IncompleteError, one_line
from flyte_ddp.report.console import say
from flyte_ddp.report.record import RunInfo
from flyte_ddp.report.tracker import Tracker, first_part
from flyte_ddp.text import USER, encodable, shortened

ADDRESS = "MLFLOW_TRACKING_URI"  # an environment variable, read early, because mlflow.set_tracking_uri changes it
# Tags of a run
TRAINING = "flyte_ddp.training"  # the id of its training
STEPS = "flyte_ddp.steps"  # the last step of each group of values
MODEL = "flyte_ddp.model"  # the digest of the model's metadata
ADD_SECONDS = 30.0  # how long an export waits until its files are with the run
# Limits of servers, also of older ones
MOST_METRICS = 900  # in a request
MOST_PARAMETERS = 100  # in a request
MOST_IN_NAME = 250  # characters
MOST_CHARACTERS = 400  # in a value; shortened() returns a little more
SEND_SECONDS = 1.0  # between two requests, unless there is enough for one
RETRY_SECONDS = 10.0  # after a request that failed
MOST_WAITING = 100_000  # measures that no server has taken; the oldest are lost first
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # MLflow's own retries take minutes; the next batch is our retry
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowRun(Tracker):
    """A run on an MLflow server. Requests that the server does not take are sent again later."""

    label = "MLflow"
    module = "mlflow"
    remedy = f"tracking mlflow needs {not_installed('mlflow-skinny', 'mlflow')}"

    def __init__(self, info: RunInfo, on_url: Callable[[str], None]):
        super().__init__(info, on_url)
        self._address = os.environ.get(ADDRESS, "")
        if not self._address:
            raise InputError(
                f"tracking mlflow needs a server: set {ADDRESS}, such as to http://mlflow.example.org:5000"
            )
        self._run_id = ""  # empty until the run is found or created
        self._reason = ""  # why the newest request failed
        self._waiting: deque[Any] = deque(maxlen=MOST_WAITING)
        self._tags: dict[str, Any] = {}
        self._sent: dict[str, int] = {}  # the last step of each group that any attempt has sent
        self._lost = 0
        self._due = 0.0  # when the next request is to be sent

    def open(self, parameters: Mapping[str, Any]) -> None:
        self._client = new_client(self._address)
        self._parameters = parameters
        from mlflow import entities

        self._entities: Any = entities
        self._send()
        if self._reason:
            say(f"MLflow is not available ({self._reason}); it is asked again every {RETRY_SECONDS:g} s")

    def describe(self, world: Mapping[str, Any], layers: Sequence[tuple[str, str, int]]) -> None:
        self._tags |= world

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Queue numbers as metrics and texts as tags of the run, and send the queue if a request is due.

        A request is due SEND_SECONDS after the previous one, or as soon as MOST_METRICS metrics wait. If a request
        fails, nothing is raised, and the next request is due RETRY_SECONDS later, however many metrics wait. The queue
        holds MOST_WAITING metrics. If there are more, the oldest are dropped and counted as lost.

        Args:
            step: the step of the metrics.
            values: the numbers and texts by name.
        """
        now = int(time.time() * 1000)
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        self._tags |= {name: value for name, value in values.items() if name not in numbers}
        self._lost += max(0, len(self._waiting) + len(numbers) - MOST_WAITING)
        self._waiting.extend(
            self._entities.Metric(to_mlflow_name(name), value, now, step) for name, value in numbers.items()
        )
        if time.monotonic() >= self._due or (len(self._waiting) >= MOST_METRICS and not self._reason):
            self._send()

    def summary(self, values: Mapping[str, Any]) -> None:
        self._tags |= values

    def finish(self, has_succeeded: bool, report: Path) -> None:
        self._send()
        if not self._reason:
            status = "FINISHED" if has_succeeded else "FAILED"
            self._try(lambda: self._client.set_terminated(self._run_id, status))
        if not self._reason:
            self._try(lambda: self._client.log_artifact(self._run_id, str(report)))
        unsent = len(self._waiting) + self._lost
        missing = [f"{unsent:,} measures"] if unsent else []
        if self._reason:
            missing.append("the report")
        if missing:
            raise IncompleteError(f"{' and '.join(missing)} could not be sent: {self._reason or 'too many at a time'}")

    def _send(self) -> None:
        """Send the queued metrics and tags, after finding or creating the run if that has not succeeded yet.

        If a request fails, nothing is raised: `_reason` says why, and what is not sent stays in the queue. If all is
        sent, `_reason` is empty. The method also sets the time at which the next request is due.
        """
        self._reason = ""
        if not self._run_id:
            self._try(self._find_run)
        while (self._waiting or self._tags) and not self._reason:
            self._try(self._send_batch)
        self._due = time.monotonic() + (RETRY_SECONDS if self._reason else SEND_SECONDS)

    def _send_batch(self) -> None:
        batch = list(islice(self._waiting, MOST_METRICS))
        groups = [(first_part(metric.key), metric.step) for metric in islice(self._waiting, MOST_METRICS + 1)]
        cut = groups[MOST_METRICS:]  # a step of a group whose rest the next request sends
        sent = {**self._sent, **dict(group for group in groups if group not in cut)}
        tags = {**self._tags, STEPS: json.dumps(sent)}
        run_tags = [self._entities.RunTag(name, to_text(value)) for name, value in tags.items()]
        self._log(self._run_id, metrics=batch, tags=run_tags)
        self._sent = sent
        self._tags = {}
        for _ in batch:
            self._waiting.popleft()

    def _find_run(self) -> None:
        """Find the MLflow run of this training, or create it, and begin to log to it.

        The method marks the run as running, and logs the parameters that the run lacks. It reads which steps earlier
        attempts have sent, and removes these steps from the queue of metrics. If the server's address begins with http,
        it prints the run's URL and passes the URL to on_url. If MLflow raises an error, so does this method, and
        _send() calls it again later.
        """
        client = self._client
        info = self.info
        name = info.options.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "flyte-ddp"
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        runs = client.search_runs([experiment], f"tags.`{TRAINING}` = '{info.tracking_id}'", max_results=1)
        run = runs[0] if runs else client.create_run(experiment, tags={TRAINING: info.tracking_id}, run_name=info.name)
        run_id = run.info.run_id
        client.update_run(run_id, "RUNNING")
        parameters = [
            self._entities.Param(name, to_text(value))
            for name, value in self._parameters.items()
            if name not in run.data.params
        ]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._log(run_id, params=parameters[start:][:MOST_PARAMETERS])
        self._run_id = run_id
        self._sent = self.earlier = json.loads(run.data.tags.get(STEPS, "{}"))
        new = (metric for metric in self._waiting if not self.has_logged(first_part(metric.key), metric.step))
        self._waiting = deque(new, MOST_WAITING)
        if self._address.startswith("http"):
            url = f"{USER.sub('', self._address).rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"
            say(f"MLflow: {url}")
            self.on_url(url)

    def _log(self, run_id: str, **what: Any) -> None:
        self._client.log_batch(run_id, synchronous=True, **what)  # an asynchronous request would outlive this thread

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # MLflow, the network and MLflow's storage of files have errors of their own
            self._reason = one_line(error) or type(error).__name__


def add_to_run(weights: Path, *files: Path) -> None:
    """Add the files to the run of the training that produced these weights, if there is one, and print what fails."""
    address = os.environ.get(ADDRESS)
    if address and find_spec("mlflow"):
        Background("MLflow", lambda: FilesOfModel(address, weights, files), ADD_SECONDS).close()


class FilesOfModel(Observer):
    """Files of a model, which close() adds to the run of its training."""

    def __init__(self, address: str, weights: Path, files: Sequence[Path]):
        self._address = address
        self._weights = weights
        self._files = files

    def close(self) -> None:
        metadata = read_metadata(self._weights)
        client = new_client(self._address)
        if run := find_run(client, metadata.digest if metadata else ""):
            for file in self._files:
                client.log_artifact(run.info.run_id, str(file))


def find_run(client: Any, digest: str) -> Any:
    """Return the MLflow run of the training whose model's metadata have this digest; None if there is none, or ""."""
    if not digest:
        return None
    experiments = [one.experiment_id for one in client.search_experiments()]
    return next(iter(client.search_runs(experiments, f"tags.`{MODEL}` = '{digest}'", max_results=1)), None)


def new_client(address: str) -> Any:
    """Return a client that gives up early and prints nothing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return MlflowClient(address)


def to_text(value: Any) -> str:
    """Return a value as MLflow takes it: a text of limited length."""
    return shortened(encodable(str(value)), MOST_CHARACTERS)


def to_mlflow_name(measure: str) -> str:
    """Return a measure's name as MLflow takes it, without characters and path parts that MLflow refuses."""
    parts = re.sub(r"[^\w. /-]", "_", measure).split("/")
    return "/".join(part for part in parts if part.strip("."))[:MOST_IN_NAME].rstrip("/")
