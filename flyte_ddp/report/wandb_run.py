"""A Weights & Biases run, owned by the parent: one run, whatever the number of ranks and attempts."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import requests

from flyte_ddp.events import EpochChosen, EpochFinished, GradientsSeen, Observer, RunStarted, StepLogged
from flyte_ddp.report.background import IncompleteError, one_line
from flyte_ddp.report.console import say
from flyte_ddp.report.goodput import share_of
from flyte_ddp.report.predictions import Predictions, predictions_of
from flyte_ddp.report.record import RunFailed, RunFinished, RunInfo
from flyte_ddp.report.tracker import DIGEST, apart, figures_of, parameters_of, world_of

# As in the tutorial: how many images of each of the first test batches go into the table
BATCHES_SHOWN = 10
IMAGES_PER_BATCH = 32

PROBE_SECONDS = (4.0, 6.0)  # to connect to W&B, and for an answer
INIT_SECONDS = 12.0
FINISH_SECONDS = 15.0  # together with the above less than tracking.CLOSE_SECONDS


class WandbRun(Observer):
    """Logs what the tutorial logs. If W&B cannot be reached, the run is stored offline for `wandb sync`."""

    def __init__(self, info: RunInfo, mode: str, on_url: Callable[[str], None]):
        """mode: online or offline. on_url: called with the run's URL once it is known."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")  # wandb prints before it reads its settings
        # keeps an offline run's table here too, not in the user's folder, where it would be forgotten
        os.environ["WANDB_DATA_DIR"] = str(info.logs / "wandb")
        import wandb

        self._wandb: Any = wandb
        self._info, self._exit_code = info, 1
        self._steps_per_epoch, self._step = 1, 0
        self._unsaid = Unsaid()
        wandb.termsetup(wandb.setup().settings, self._unsaid)
        reason = unreachable() if mode == "online" else ""
        earlier = {*info.logs.glob("wandb/run-*")}  # of other attempts, whose last measures may still be unsent
        if mode == "online" and not reason:
            try:
                self._run = self._init("online")
            except Exception as error:  # wandb raises its own errors and those of the network
                reason = one_line(error)
                wandb.teardown()  # else it would refuse to start the same run again
                for begun in {*info.logs.glob("wandb/run-*")} - earlier:
                    shutil.rmtree(begun)
        if mode == "offline" or reason:
            self._run = self._init("offline")
        self._folder = os.path.dirname(self._run.dir)
        if reason:
            say(f"Weights & Biases is not available ({reason}); to send the run later: wandb sync {self._folder}")
        elif mode == "online":
            say(f"Weights & Biases: {self._run.url}")
            on_url(self._run.url)

    def on_run_started(self, event: RunStarted) -> None:
        self._steps_per_epoch = event.steps_per_epoch
        settings = {field.name for field in fields(self._info.settings)}
        chosen = {"backend", "precision", *(["dataset"] if self._info.description else [])}  # in place of auto
        self._run.config.update(apart(settings - chosen, world_of(event)), allow_val_change=True)
        self._run.summary["graph_0"] = self._graph(event)

    def on_step_logged(self, event: StepLogged) -> None:
        self._step = event.epoch * self._steps_per_epoch + event.step
        measured = {name if name == "loss" else f"train_{name}": x for name, x in event.measures.items()}
        by_parameter = event.gradient_norms if self._info.options.log_gradients else {}
        norms = {f"gradient_norms/{name}": norm for name, norm in by_parameter.items()}
        self._log({**measured, **apart(measured, {**figures_of(event), "epoch": event.epoch + 1}), **norms})

    def on_gradients_seen(self, event: GradientsSeen) -> None:
        histogram = self._wandb.Histogram
        seen = event.histograms.items()
        self._log({f"gradients/{name}": histogram(np_histogram=counted) for name, counted in seen})

    def on_epoch_finished(self, event: EpochFinished) -> None:
        self._step = round(event.position * self._steps_per_epoch)
        measured = _of_test(event.test)
        measured.update({f"validation_{name}": x for name, x in event.validation.items()})
        figures = {name: getattr(event, name) for name in ("train_seconds", "evaluate_seconds")}
        measured["train_loss"] = event.train["loss"]
        values = {**figures, "epoch": event.position, DIGEST: event.digest}
        self._log({**measured, **apart(measured, values)})

    def on_epoch_chosen(self, event: EpochChosen) -> None:
        measured = _of_test(event.measures)
        self._run.summary.update({**measured, **apart(measured, {"best_epoch": event.position})})

    def on_run_finished(self, event: RunFinished) -> None:
        predictions = predictions_of(self._info, event)
        if predictions and self._info.description:
            name = re.sub(r"\W", "_", self._info.description.name)  # W&B makes an artifact's name of it
            self._log({f"{name}_predictions": self._table(predictions)})
        self._run.summary.update(
            {
                "total_seconds": event.total_seconds,
                "goodput": share_of(event.seconds),
                "seconds": event.seconds,
                DIGEST: event.results[0].digest,
                "warnings": [warning.reason for warning in event.results[0].warnings],
                "rank_peak_bytes": [rank.peak_bytes for rank in event.results],
            }
        )
        self._exit_code = 0

    def on_run_failed(self, event: RunFailed) -> None:
        self._run.summary["failure"] = event.reason

    def close(self) -> None:
        try:
            self._run.finish(exit_code=self._exit_code)
            if self._unsaid.has_given_up:
                raise IncompleteError("The server has refused what was measured.")
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise IncompleteError(f"{reason} To send what is missing: wandb sync {self._folder}") from error
        finally:
            with suppress(Exception):
                self._wandb.teardown()  # here, where it can be abandoned, rather than when the process ends

    def _init(self, mode: str) -> Any:
        info, wandb = self._info, self._wandb
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS,
            login_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            x_service_wait=INIT_SECONDS,
            x_graphql_timeout_seconds=PROBE_SECONDS[1],
            x_stats_track_process_tree=True,  # the ranks, not this process, do the work
            symlink=False,  # an upload of the folder would include their targets twice
            console="off",
            silent=True,
            quiet=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
        )
        return wandb.init(
            mode=mode,
            dir=str(info.logs),
            id=info.tracking_id,
            name=info.name,
            resume="allow",
            project=info.options.wandb_project or os.environ.get("WANDB_PROJECT") or "flyte-ddp",
            entity=info.options.wandb_entity or None,
            config=parameters_of(info),
            settings=settings,
        )

    def _log(self, values: dict[str, Any]) -> None:
        # With the step, so that steps which a resumed training repeats are not logged twice
        self._run.log(values, step=self._step)

    def _graph(self, event: RunStarted) -> Any:
        """The topology as wandb.watch would show it; made without the network, which the parent does not have."""
        graph = self._wandb.Graph("torch")
        for name, kind, parameters in event.layers:
            graph.add_node(id=name, name=name, class_name=kind, num_parameters=[parameters])
        return graph

    def _table(self, predictions: Predictions) -> Any:
        """Picture, predicted and true class, and the score of each class."""
        classes = predictions.classes
        table = self._wandb.Table(columns=["id", "image", "guess", "truth", *(f"score_{name}" for name in classes)])
        guesses = predictions.guesses
        for index in shown_images(len(predictions.labels), self._info.settings.test_batch_size):
            pixels = predictions.images[index].transpose(1, 2, 0)
            names = classes[guesses[index]], classes[predictions.labels[index]]
            scores = [round(float(score), 6) for score in np.exp(predictions.scores[index])]
            table.add_data(str(index), self._wandb.Image(pixels.squeeze()), *names, *scores)
        return table


class Unsaid:
    """Takes what wandb would print if it were not silent, and notes whether it has given up sending.

    It does so, and then finishes as if all were sent, where the server refuses: a run that was deleted, a key that was
    revoked.
    """

    def __init__(self) -> None:
        self.has_given_up = False

    def warning(self, text: str) -> None:
        self.has_given_up = self.has_given_up or "will not be synced" in text

    def info(self, text: str) -> None:
        pass

    error = info


def _of_test(measures: dict[str, float]) -> dict[str, float]:
    """The measures under the tutorial's names."""
    return {"test_loss" if name == "loss" else name: value for name, value in measures.items()}


def shown_images(count: int, batch_size: int) -> list[int]:
    """Indices of the test images in the table: the first of each of the first batches."""
    indices = range(count)
    batches = [indices[start:][:batch_size] for start in indices[::batch_size][:BATCHES_SHOWN]]
    return [index for batch in batches for index in batch[:IMAGES_PER_BATCH]]


def unreachable() -> str:
    """Why W&B cannot be reached, or "". wandb itself would keep trying for a long time."""
    if not has_key():
        return "no key: set WANDB_API_KEY, or run `wandb login`"
    try:
        requests.head(base_url(), timeout=PROBE_SECONDS, allow_redirects=False)
    except requests.RequestException as error:
        return f"{type(error).__name__}, {base_url()}"
    return ""


def has_key() -> bool:
    """Whether W&B has a key here: in WANDB_API_KEY, or in the netrc file that `wandb login` writes."""
    with suppress(ValueError):  # a netrc file that is not UTF-8
        return bool(os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(base_url()))
    return False


def base_url() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
