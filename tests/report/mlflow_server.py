"""A real MLflow server on this host, and what it has of a run. Without mlflow, whose tests skip, nothing here works."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from flyte_ddp.report.mlflow_run import TRAINING
from tests.commands import free_port

QUICKLY = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


class MlflowServer:
    def __init__(self, process: "subprocess.Popen[bytes]", port: int):
        self._process, self.port, self.url = process, port, f"http://127.0.0.1:{port}"

    def send(self, number: signal.Signals) -> None:
        """To all its processes."""
        os.killpg(self._process.pid, number)

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.url)

    def run(self, training: str, experiment: str = "flyte-ddp") -> Any:
        """The only run of the training."""
        place = self.client.get_experiment_by_name(experiment)
        (run,) = self.client.search_runs([place.experiment_id], f"tags.`{TRAINING}` = '{training}'")
        return run

    def points(self, run: Any, name: str) -> list[tuple[int, float]]:
        """Step and value of a measure, as often as it was logged."""
        return [(one.step, one.value) for one in self.client.get_metric_history(run.info.run_id, name)]


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[MlflowServer]:
    """It keeps its data in the folder: another one there, at the same port, goes on where it ended."""
    port = port or free_port()
    places = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *places, "--workers", "1", "--port", str(port)]
    with open(folder / "server.log", "a") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **QUICKLY}, stdout=log, stderr=log, start_new_session=True
        )
    server = MlflowServer(process, port)
    try:
        session = requests.Session()
        patient = Retry(total=None, connect=120, backoff_factor=0.1, backoff_max=1)
        session.mount("http://", HTTPAdapter(max_retries=patient))
        assert session.get(f"{server.url}/health", timeout=60).text == "OK"
        yield server
    finally:
        server.send(signal.SIGKILL)
        process.wait()
