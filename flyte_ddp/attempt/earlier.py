"""What the attempts before have left of their progress, from which it follows where their seconds have gone."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.run import Run
from flyte_ddp.report.goodput import Attempt
from flyte_ddp.report.progress import FILE, attempts_in
from flyte_ddp.whole_files import temporary_beside


def earlier_attempts(platform: Platform, run: Run, resume: bool) -> list[Attempt]:
    """Those at this training, as far as that can be read: it is told, and decides nothing. resume: see RunOptions."""
    if platform.is_local():
        goes_on = resume and run.store.path.exists() and not run.store.is_given
        return attempts_in(_beside_checkpoint(run)) if goes_on else []
    # An earlier process of this attempt, if only that was started again, or the attempt before
    for place in (platform.logs_url, platform.previous_logs_url):
        with suppress(Exception), tempfile.TemporaryDirectory() as folder:
            platform.get(f"{place()}/{FILE}", Path(folder, FILE))
            if attempts := attempts_in(Path(folder, FILE)):
                return attempts
    return []


def leave_progress(platform: Platform, run: Run) -> None:
    """Keeps a local run's beside its checkpoint, for the run that goes on from there; elsewhere the logs stay."""
    if platform.is_local():
        path = _beside_checkpoint(run)
        with suppress(OSError):
            os.link(run.logs.folder / FILE, linked := temporary_beside(path))
            os.replace(linked, path)


def _beside_checkpoint(run: Run) -> Path:
    return run.store.path.with_name(FILE)
