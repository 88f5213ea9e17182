"""An MLflow run, owned by the parent: one run, whatever the number of ranks and attempts.

By a client of its own: MLflow's global run, experiment and address are the user's.
"""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from flyte_ddp.events import Observer, RunStarted
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.report.background import IncompleteError, one_line
from flyte_ddp.report.console import say
from flyte_ddp.report.record import RunFailed, RunFinished, RunInfo
from flyte_ddp.report.tracker import DIGEST, Tracker, parameters_of, world_of
from flyte_ddp.text import USER, encodable, shortened

ADDRESS = "MLFLOW_TRACKING_URI"  # of the environment; read early, because mlflow.set_tracking_uri changes it
# Tags of a run: which training's it is, the last step of each group of measures, and the digest of the model's metadata
TRAINING, STEPS, MODEL = "flyte_ddp.training", "flyte_ddp.steps", "flyte_ddp.model"
# What servers take, older ones too: of a request, of a name, and of a value, of which shortened() returns a little more
MOST_METRICS, MOST_PARAMETERS, MOST_IN_NAME, MOST_CHARACTERS = 900, 100, 250, 400
SEND_SECONDS = 1.0  # between two requests, unless there is enough for one
RETRY_SECONDS = 10.0  # after a request that failed
MOST_WAITING = 100_000  # measures that no server has taken; the oldest are lost first
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # MLflow's own take minutes; ours is the next batch
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowRun(Tracker):
    """Sends parameters, measures and the report. What the server does not take is sent again later."""

    def __init__(self, info: RunInfo, address: str, folder: Path, on_url: Callable[[str], None]):
        """address: of the server. folder: has report and model when the run ends. on_url: called with the run's URL."""
        super().__init__(info)
        self._address, self._client = address, new_client(address)
        from mlflow import entities

        self._entities: Any = entities
        self._folder, self._on_url = folder, on_url
        self._run_id, self._status, self._reason = "", "FAILED", ""
        self._waiting: deque[Any] = deque(maxlen=MOST_WAITING)
        self._tags: dict[str, Any] = {}
        self._sent: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        self._lost, self._due = 0, 0.0
        self._send()
        if self._reason:
            say(f"MLflow is not available ({self._reason}); it is asked again every {RETRY_SECONDS:g} s")

    def on_run_started(self, event: RunStarted) -> None:
        super().on_run_started(event)
        self._tags |= world_of(event)

    def on_run_finished(self, event: RunFinished) -> None:
        self._status, self._tags[DIGEST] = "FINISHED", event.results[0].digest
        metadata = read_metadata(self._folder / "model.pt")
        if metadata:
            self._tags[MODEL] = metadata.digest

    def on_run_failed(self, event: RunFailed) -> None:
        self._tags["failure"] = event.reason

    def close(self) -> None:
        self._send()
        if not self._reason:
            self._try(lambda: self._client.set_terminated(self._run_id, self._status))
        if not self._reason:
            self._try(lambda: self._client.log_artifact(self._run_id, str(self._folder / "report.html")))
        unsent = len(self._waiting) + self._lost
        missing = [f"{unsent:,} measures"] * bool(unsent) + ["the report"] * bool(self._reason)
        if missing:
            raise IncompleteError(f"{' and '.join(missing)} could not be sent: {self._reason or 'too many at a time'}")

    def _scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        if step <= self._reached.get(group, -1):  # a resumed training repeats it
            return
        self._reached[group], now = step, int(time.time() * 1000)
        self._lost += max(0, len(self._waiting) + len(values) - MOST_WAITING)
        self._waiting.extend(
            self._entities.Metric(name_of(f"{group}/{name}"), value, now, step) for name, value in values.items()
        )
        if time.monotonic() >= self._due or (len(self._waiting) >= MOST_METRICS and not self._reason):
            self._send()

    def _digest(self, step: int, digest: str) -> None:
        self._tags[DIGEST] = digest  # the latest: MLflow has no series of texts

    def _send(self) -> None:
        """Sends what is waiting; afterwards _reason says why that failed, and is empty if it did not."""
        self._reason = ""
        if not self._run_id:
            self._try(self._open)
        while (self._waiting or self._tags) and not self._reason:
            self._try(self._send_batch)
        self._due = time.monotonic() + (RETRY_SECONDS if self._reason else SEND_SECONDS)

    def _send_batch(self) -> None:
        batch = list(islice(self._waiting, MOST_METRICS))
        sent = {**self._sent, **{group_of(metric): metric.step for metric in batch}}
        tags = {**self._tags, STEPS: json.dumps(sent)}
        run_tags = [self._entities.RunTag(name, text_of(value)) for name, value in tags.items()]
        self._log(self._run_id, metrics=batch, tags=run_tags)
        self._sent, self._tags = sent, {}
        for _ in batch:
            self._waiting.popleft()

    def _open(self) -> None:
        """Finds the run of an earlier attempt, or begins one."""
        client, info = self._client, self._info
        name = info.options.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "flyte-ddp"
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        runs = client.search_runs([experiment], f"tags.`{TRAINING}` = '{info.tracking_id}'", max_results=1)
        run = runs[0] if runs else client.create_run(experiment, tags={TRAINING: info.tracking_id}, run_name=info.name)
        run_id = run.info.run_id
        client.update_run(run_id, "RUNNING")
        parameters = [
            self._entities.Param(name, text_of(value))
            for name, value in parameters_of(info).items()
            if name not in run.data.params
        ]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._log(run_id, params=parameters[start:][:MOST_PARAMETERS])
        self._run_id, self._sent = run_id, json.loads(run.data.tags.get(STEPS, "{}"))
        new = (metric for metric in self._waiting if metric.step > self._sent.get(group_of(metric), -1))
        self._waiting = deque(new, MOST_WAITING)
        self._reached.update({group: max(step, self._reached.get(group, -1)) for group, step in self._sent.items()})
        if self._address.startswith("http"):
            url = f"{USER.sub('', self._address).rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"
            say(f"MLflow: {url}")
            self._on_url(url)

    def _log(self, run_id: str, **what: Any) -> None:
        self._client.log_batch(run_id, synchronous=True, **what)  # in the background it would outlive this thread

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # MLflow's own, the network's, and those of where it keeps its files
            self._reason = one_line(error) or type(error).__name__


class FilesOfModel(Observer):
    """Adds files to the run of the training that a model is from, when it is closed."""

    def __init__(self, address: str, weights: Path, *files: Path):
        self._address, self._weights, self._files = address, weights, files

    def close(self) -> None:
        metadata, client = read_metadata(self._weights), new_client(self._address)
        if run := run_of(client, metadata.digest if metadata else ""):
            for file in self._files:
                client.log_artifact(run.info.run_id, str(file))


def run_of(client: Any, digest: str) -> Any:
    """The run of the training of a model whose metadata have this digest; None if there is none."""
    if not digest:
        return None
    experiments = [one.experiment_id for one in client.search_experiments()]
    return next(iter(client.search_runs(experiments, f"tags.`{MODEL}` = '{digest}'", max_results=1)), None)


def new_client(address: str) -> Any:
    """An impatient and quiet one."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return MlflowClient(address)


def group_of(metric: Any) -> str:
    return str(metric.key.partition("/")[0])


def text_of(value: Any) -> str:
    """The value as MLflow takes it."""
    return shortened(encodable(str(value)), MOST_CHARACTERS)


def name_of(measure: str) -> str:
    """The name as MLflow takes it: no other characters, and no part that a path would not have."""
    parts = re.sub(r"[^\w. /-]", "_", measure).split("/")
    return "/".join(part for part in parts if part.strip("."))[:MOST_IN_NAME].rstrip("/")
