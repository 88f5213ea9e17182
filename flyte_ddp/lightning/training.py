"""A training under Lightning on whatever platform runs it: see flyte_ddp.attempt.training."""

import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.pod import check_code, check_gpus
from flyte_ddp.attempt.restarts import restarting
from flyte_ddp.attempt.training import Trained, train_by
from flyte_ddp.attempt.webhook import telling_webhook
from flyte_ddp.data import prepared
from flyte_ddp.engine.job import Job, Subject, TrainingResult, subject_of
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.events import Event
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, choose_world, visible_gpus
from flyte_ddp.launch.link import Link
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.settings import LightningOptions, LightningSettings
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.user_code import UserCode, find_code, joined

RANK = "flyte_ddp.lightning.rank:run"  # names, because importing them would import torch
TRAIN = "flyte_ddp.lightning.rank:train"


@dataclass(frozen=True)
class LightningCode:
    """A LightningModule and its data, known only by their names; see LightningTraining.

    Attributes:
        code: of both, under the module's name.
        data: name of the LightningDataModule, if there is one.
    """

    code: UserCode
    data: str
    headline: str
    percent: tuple[str, ...]

    def subject(self, settings: LightningSettings, source: Path | None) -> Subject:
        """What is trained; ReportedError if this pod's code is not what was registered."""
        check_code(self.code.version)
        description = prepared.read_description(source) if source and (source / prepared.DESCRIPTION).exists() else None
        # whatever is around the ranks needs but what both kinds of settings have
        return subject_of(self.code, cast(TrainingSettings, settings), source, description=description)

    def job(self, run: Job, options: LightningOptions) -> LightningJob:
        return LightningJob(run, self.data, options.strategy, self.headline, self.percent)


def find_lightning_code(
    module: str, data: str, headline: str, percent: Sequence[str], data_files: Sequence[str]
) -> LightningCode:
    """Raises InputError if there are no such classes."""
    ranks = (RANK.partition(":")[0],)
    codes = [find_code(module, data_files, ranks), *([find_code(data, ranks=ranks)] if data else [])]
    return LightningCode(joined(codes), data, headline, tuple(percent))


def train(
    platform: Platform,
    lit: LightningCode,
    settings: LightningSettings,
    options: LightningOptions,
    fetch: Callable[[], Path | None],
    own_observers: Sequence[UserCode] = (),
) -> Trained:
    """Trains with one process per rank, as a task does it.

    fetch: downloads the data, if there are any, while the ranks' first process imports Lightning. own_observers: the
    user's. Raises what launcher.launch raises, and on a cluster the platform's error.
    """
    with telling_webhook(platform), platform_errors(platform):
        check_lightning(settings, options)
        check_gpus(visible_gpus())
        world = choose_world(settings.backend, options.nproc, sys.maxsize)  # the module's own batch size is of one rank
        launcher.warm_up([*launcher.PRELOAD, "lightning.pytorch"])

        def start(run: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
            job = lit.job(run, options)
            return launcher.launch(RANK, world, job, options.timeout_seconds, on_event, root=lit.code.root)

        return train_by(
            platform, restarting(platform, start), world, lambda: lit.subject(settings, fetch()), options, own_observers
        )


def train_as_rank(
    platform: Platform,
    lit: LightningCode,
    settings: LightningSettings,
    options: LightningOptions,
    fetch: Callable[[], Path | None],
    own_observers: Sequence[UserCode] = (),
) -> Trained | None:
    """Trains as one rank of many nodes, in a process that Flyte's Elastic plugin has started; returns what rank 0 has
    trained, else None."""
    from flyte_ddp.attempt import multinode  # it imports torch

    def subject() -> Subject:
        check_lightning(settings, options)
        return lit.subject(settings, fetch())

    def train(environment: Environment, device: Any, link: Link, run: Job) -> TrainingResult:
        result: TrainingResult = pkgutil.resolve_name(TRAIN)(environment, device, link, lit.job(run, options))
        return result

    return multinode.train_as_rank(platform, cast(TrainingSettings, settings), options, subject, own_observers, train)


def check_lightning(settings: LightningSettings, options: LightningOptions) -> None:
    """Raises InputError for what this machine, or Lightning, cannot do."""
    for value, kind in ((settings, LightningSettings), (options, LightningOptions)):
        if not isinstance(value, kind):
            raise InputError(f"{type(value).__name__} must derive from flyte_ddp.{kind.__name__}")
    if find_spec("lightning") is None:
        raise InputError(f"a LightningModule needs {not_installed('lightning', 'lightning')}")
    if settings.precision == "float16" and not visible_gpus():
        raise InputError(
            "precision float16 needs a GPU (Lightning's 16-mixed does not run on a CPU) and none is visible here: "
            "use bfloat16 or float32"
        )
