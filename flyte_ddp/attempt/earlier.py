"""The progress and TensorBoard files that earlier attempts have left."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.run import Run
from flyte_ddp.report.goodput import Attempt
from flyte_ddp.report.progress import FILE, attempts_in
from flyte_ddp.report.record import RunInfo
from flyte_ddp.report.tensorboard import events_file
from flyte_ddp.whole_files import temporary_beside


def earlier_attempts(platform: Platform, run: Run, resume: bool) -> list[Attempt]:
    """Return the earlier attempts at this training, as far as they can be read. They are reported, and decide nothing.

    Args:
        platform: the platform.
        run: this attempt's files.
        resume: whether this attempt may resume.
    """
    if platform.is_local():
        goes_on = resume and run.store.path.exists() and not run.store.is_given
        return attempts_in(_beside_checkpoint(run)) if goes_on else []
    # The progress is that of an earlier process of this attempt, if there was one, or of the attempt before
    for place in (platform.logs_url, platform.previous_logs_url):
        with suppress(Exception), tempfile.TemporaryDirectory() as folder:
            platform.get(f"{place()}/{FILE}", Path(folder, FILE))
            if attempts := attempts_in(Path(folder, FILE)):
                return attempts
    return []


def leave_progress(platform: Platform, run: Run) -> None:
    """Keep a local run's progress beside its checkpoint, for the run that continues from there.

    Elsewhere the logs stay.
    """
    if platform.is_local():
        _link(run.logs.folder / FILE, _beside_checkpoint(run))


def share_events(platform: Platform, run: Run, info: RunInfo) -> None:
    """Continue the TensorBoard file of the attempts before, if there is one."""
    if info.options.tracking != "tensorboard":
        return
    file = events_file(info)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    if platform.is_local():
        beside = run.store.path.with_name(file.name)
        with suppress(OSError):
            beside.touch()
        _link(beside, file)
        return
    for place in (platform.logs_url, platform.previous_logs_url):
        with suppress(Exception):
            platform.get(f"{place()}/{file.relative_to(run.logs.folder).as_posix()}", file)
            return


def _link(file: Path, other: Path) -> None:
    """Give the file another name, if the disk can."""
    with suppress(OSError):
        os.link(file, linked := temporary_beside(other))
        os.replace(linked, other)


def _beside_checkpoint(run: Run) -> Path:
    return run.store.path.with_name(FILE)
