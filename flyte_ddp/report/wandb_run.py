"""A Weights & Biases run, owned by the parent: one run, whatever the number of ranks and attempts."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import requests

from flyte_ddp.report.background import IncompleteError, one_line
from flyte_ddp.report.console import say
from flyte_ddp.report.predictions import Predictions
from flyte_ddp.report.tracker import Tracker, first_part, rename_taken
from flyte_ddp.report.wandb_compat import kill_service

# The tutorial's table has so many images of each of the first test batches
BATCHES_SHOWN = 10
IMAGES_PER_BATCH = 32

PROBE_SECONDS = (4.0, 6.0)  # time to connect to W&B, and to wait for an answer
INIT_SECONDS = 12.0
FINISH_SECONDS = 15.0  # together with INIT_SECONDS less than tracking.CLOSE_SECONDS
AXIS = "steps"  # a row's value of steps/train is the step of its values train/…


class WandbRun(Tracker):
    """A W&B run with the tutorial's table of predictions.

    If W&B cannot be reached, the run is stored for `wandb sync`.
    """

    label = "Weights & Biases"

    def open(self, parameters: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")  # wandb prints before it reads its settings
        # An offline run's table, too, belongs in the logs: in the user's folder it would be forgotten
        os.environ["WANDB_DATA_DIR"] = str(self.info.logs / "wandb")
        import wandb

        self._wandb: Any = wandb
        self._parameters = parameters
        self._unsaid = Unsaid()
        wandb.termsetup(wandb.setup().settings, self._unsaid)
        mode = self.info.options.tracking
        reason = explain_unreachable() if mode == "online" else ""
        # Other attempts' folders are kept, because their last measures may still be unsent
        earlier = {*self.info.logs.glob("wandb/run-*")}
        if mode == "online" and not reason:
            try:
                self._run = self._init("online")
            except Exception as error:  # wandb raises its own errors and those of the network
                reason = one_line(error)
                wandb.teardown()  # without this, wandb would refuse to start the same run again
                for begun in {*self.info.logs.glob("wandb/run-*")} - earlier:
                    shutil.rmtree(begun)
        if mode == "offline" or reason:
            self._run = self._init("offline")
        self._folder = os.path.dirname(self._run.dir)
        if reason:
            say(f"Weights & Biases is not available ({reason}); to send the run later: wandb sync {self._folder}")
        elif mode == "online":
            say(f"Weights & Biases: {self._run.url}")
            self.on_url(self._run.url)
        values = dict(self._run.summary).items()  # the last value of each name in a resumed run
        axis = f"{AXIS}/"
        self.earlier = {name.removeprefix(axis): int(step) for name, step in values if name.startswith(axis)}
        self._groups: set[str] = set()  # the groups whose axis W&B knows

    def describe(self, world: Mapping[str, Any], layers: Sequence[tuple[str, str, int]]) -> None:
        """Add facts about the attempt to the run's config, and show the network's layers as wandb.watch would.

        Args:
            world: the facts by name. The names backend, precision and, for an image classifier, dataset replace the
                setting in the config, which may be "auto". Any other name of a setting gets the prefix "run.".
            layers: name, type and number of parameters of each layer.
        """
        settings = {field.name for field in fields(self.info.settings)}
        chosen = {"backend", "precision", *(["dataset"] if self.info.description else [])}  # in place of auto
        self._run.config.update(rename_taken(settings - chosen, world), allow_val_change=True)
        graph = self._wandb.Graph("torch")  # wandb.watch needs the network, which this process does not have
        for name, kind, parameters in layers:
            graph.add_node(id=name, name=name, class_name=kind, num_parameters=[parameters])
        self._run.summary["graph_0"] = graph

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values as one row of the W&B run.

        The part of a name before the first slash is its group. For each group, the row also has the step, as
        steps/GROUP, over which W&B draws the group's values.
        """
        groups = {first_part(name) for name in values}
        for group in groups - self._groups:
            for pattern in (group, f"{group}/*"):
                self._run.define_metric(pattern, step_metric=f"{AXIS}/{group}")
        self._groups |= groups
        # Without W&B's own step, with which W&B would hold the row back until the next one
        self._run.log({**values, **{f"{AXIS}/{group}": step for group in groups}})

    def histograms(self, step: int, counted: Mapping[str, tuple[list[float], list[float]]]) -> None:
        self.log(step, {name: self._wandb.Histogram(np_histogram=bins) for name, bins in counted.items()})

    def predictions(self, step: int, predictions: Predictions) -> None:
        self.log(step, {"predictions": self._table(predictions)})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def finish(self, has_succeeded: bool, report: Path) -> None:
        try:
            self._run.finish(exit_code=0 if has_succeeded else 1)
            if self._unsaid.has_given_up:
                raise IncompleteError("The server has refused what was measured.")
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise IncompleteError(f"{reason} To send what is missing: wandb sync {self._folder}") from error
        finally:
            with suppress(Exception):
                self._wandb.teardown()  # abandon() can end this call, but not the one when the process ends

    def abandon(self) -> None:
        kill_service()

    def _init(self, mode: str) -> Any:
        info = self.info
        wandb = self._wandb
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS,
            login_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            x_service_wait=INIT_SECONDS,
            x_graphql_timeout_seconds=PROBE_SECONDS[1],
            x_stats_track_process_tree=True,  # the ranks, not this process, do the work
            symlink=False,  # an upload of the folder would include the links' targets twice
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
            config=dict(self._parameters),
            settings=settings,
        )

    def _table(self, predictions: Predictions) -> Any:
        """Return a W&B table with one row for each test image that shown_images() chooses.

        A row has the image's index, the picture, the names of the predicted and the true class, and the probability of
        each class.
        """
        classes = predictions.classes
        table = self._wandb.Table(columns=["id", "image", "guess", "truth", *(f"score_{name}" for name in classes)])
        guesses = predictions.guesses
        for index in shown_images(len(predictions.labels), self.info.settings.test_batch_size):
            pixels = predictions.images[index].transpose(1, 2, 0)
            names = classes[guesses[index]], classes[predictions.labels[index]]
            scores = [round(float(score), 6) for score in np.exp(predictions.scores[index])]
            table.add_data(str(index), self._wandb.Image(pixels.squeeze()), *names, *scores)
        return table


class Unsaid:
    """The messages that wandb would print if it were not silent, and whether wandb has given up sending.

    If the server refuses, as for a run that was deleted, wandb gives up, and finishes as if all were sent.
    """

    def __init__(self) -> None:
        self.has_given_up = False

    def warning(self, text: str) -> None:
        self.has_given_up = self.has_given_up or "will not be synced" in text

    def info(self, text: str) -> None:
        pass

    error = info


def shown_images(count: int, batch_size: int) -> list[int]:
    """Return the indices of the images in the table: IMAGES_PER_BATCH of each of the first BATCHES_SHOWN batches."""
    indices = range(count)
    batches = [indices[start:][:batch_size] for start in indices[::batch_size][:BATCHES_SHOWN]]
    return [*chain.from_iterable(batch[:IMAGES_PER_BATCH] for batch in batches)]


def explain_unreachable() -> str:
    """Return why W&B cannot be used: there is no key, or its server does not answer. Return "" if it can be used.

    The server has ten seconds to answer. Whether the server accepts the key is not checked.
    """
    if not has_key():
        return "no key: set WANDB_API_KEY, or run `wandb login`"
    try:
        # wandb itself would keep trying for a long time
        requests.head(base_url(), timeout=PROBE_SECONDS, allow_redirects=False)
    except requests.RequestException as error:
        return f"{type(error).__name__}, {base_url()}"
    return ""


def has_key() -> bool:
    """Return whether W&B has a key: in WANDB_API_KEY, or in the netrc file that `wandb login` writes."""
    with suppress(ValueError):  # a netrc file that is not UTF-8
        return bool(os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(base_url()))
    return False


def base_url() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
