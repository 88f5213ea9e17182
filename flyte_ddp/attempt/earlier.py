"""What the attempts before have left of their progress, from which it follows where their seconds have gone."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.run import Run
from flyte_ddp.report.goodput import Attempt
from flyte_ddp.report.progress import FILE, attempts_in


def earlier_attempts(platform: Platform, run: Run) -> list[Attempt]:
    """Those at this training, as far as that can be read: it is told, and decides nothing."""
    if platform.is_local():
        return attempts_in(_beside_checkpoint(run)) if run.store.path.exists() else []
    # An earlier process of this attempt, if only that was started again, or the attempt before
    for url in filter(None, (platform.logs_url(), platform.previous_logs_url())):
        with suppress(Exception), tempfile.TemporaryDirectory() as folder:
            platform.get(f"{url}/{FILE}", Path(folder, FILE))
            return attempts_in(Path(folder, FILE))
    return []


def leave_progress(platform: Platform, run: Run) -> None:
    """Keeps a local run's beside its checkpoint, for the run that goes on from there; elsewhere the logs stay."""
    if platform.is_local():
        with suppress(OSError):
            _beside_checkpoint(run).unlink(missing_ok=True)
            os.link(run.logs.folder / FILE, _beside_checkpoint(run))


def _beside_checkpoint(run: Run) -> Path:
    return run.store.path.with_name(FILE)
