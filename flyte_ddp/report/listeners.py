"""Who hears of a training without Flyte: a terminal and a progress file, or a report and a tracker, too."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from flyte_ddp.code.user_code import UserCode
from flyte_ddp.engine.job import Job
from flyte_ddp.events import Event, all_of
from flyte_ddp.launch.environment import is_first_rank
from flyte_ddp.report.background import Background
from flyte_ddp.report.console import open_console
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.observing import Observers
from flyte_ddp.report.own_observers import OBSERVER_SECONDS, OwnObservers
from flyte_ddp.report.progress import FILE, ProgressFile
from flyte_ddp.report.record import RunFailed, RunFinished, RunInfo, tracking_id
from flyte_ddp.report.summary import say_summary
from flyte_ddp.report.surroundings import surroundings

OnEvent = Callable[[Event], None] | None


class Listeners:
    """As Observers, without a report: on_event, or else the terminal, and on the first rank the others."""

    def __init__(self, folder: Path, job: Job, watching: Sequence[UserCode], on_event: OnEvent, goodput: Goodput):
        is_first, self._console = is_first_rank(), ExitStack()
        make = partial(ProgressFile, folder, folder.name, goodput=goodput)
        self._closed: list[OwnObservers | Background] = [OwnObservers(watching if is_first else ())]
        self._closed += [Background(FILE, make, OBSERVER_SECONDS)] if is_first else []
        listen = on_event or self._console.enter_context(closing(open_console()))
        self._tell = all_of(goodput, listen, *self._closed)
        self._last: RunFinished | RunFailed | None = None

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, stack: Any) -> None:
        if error:  # which may be Ctrl-C while the end waits: what has been trained is no failure
            self.end(self._last or RunFailed.by(error))

    def __call__(self, event: Event) -> None:
        self._tell(event)

    def end(self, event: RunFinished | RunFailed) -> None:
        self._last = event
        self._console.close()
        while self._closed:
            self._closed.pop(0).close(event)


class ReportingListeners(Observers):
    """As those of a task, and on_event besides; in the end they say what has come of it."""

    def __init__(self, folder: Path, job: Job, watching: Sequence[UserCode], on_event: OnEvent, goodput: Goodput):
        self._page, self._model = folder / "report.html", Path(job.model_path)
        super().__init__(info_of(folder, job, goodput), self._page, lambda html: None, goodput=goodput, own=watching)
        self._on_event = on_event

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if self._on_event:
            self._on_event(event)

    def end(self, event: RunFinished | RunFailed) -> None:
        super().end(event)
        if isinstance(event, RunFinished):
            say_summary(self.record, self._model, self._page, show_paths=True)


def info_of(folder: Path, job: Job, goodput: Goodput) -> RunInfo:
    """What is known before it starts."""
    return RunInfo(
        name=folder.name,
        recipe=job.recipe,
        tracking_id=tracking_id(job.key, f"{folder}/{goodput.attempts[0].began}"),
        attempt=0,
        settings=job.settings,
        options=job.options,
        data=None,
        description=None,
        data_seconds=0.0,
        logs=folder,
        checkpoint=str(folder),
        surroundings=surroundings(),
    )
