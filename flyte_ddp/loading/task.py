"""The loading study as a Flyte task: from a folder of images to the recommended setting and a page that shows why."""

from dataclasses import dataclass
from pathlib import Path

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.data.prepared import prepared
from flyte_ddp.events import Event, Printed
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.outputs import output_page
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world, visible_gpus
from flyte_ddp.loading.page import loading_page
from flyte_ddp.loading.times import LoadingJob, LoadingSettings, LoadingTimes, recommended
from flyte_ddp.report.console import say, say_last

STUDY = "flyte_ddp.loading.rank:run"  # a name, because importing it would import torch
TIMEOUT_SECONDS = 300.0  # without a batch, after which the study counts as hung


@dataclass(frozen=True)
class LoadingChoice:
    """A setting for RunOptions, and the images per second that one rank loaded with it (median)."""

    loader_workers: int
    pin_memory: bool
    images_per_second: float


@platform_errors(platform)
def study_loading(data: FlyteDirectory, study: LoadingSettings) -> tuple[LoadingChoice, FlyteFile]:
    """Times loading in one rank; returns the recommended setting and the page."""
    check_gpus(visible_gpus())
    folder = Path(data.download())
    description = prepared.verify(folder)
    world = choose_world("auto", 1, 1)
    with run_folder(platform, "loading") as out:
        job = LoadingJob(str(folder), study)
        times: LoadingTimes = launcher.launch(STUDY, world, job, TIMEOUT_SECONDS, _show)[0]
        best = recommended(times.settings)
        report = output_page(out, "Loading images", loading_page(description, times, best))
    say_last(
        f"Recommended: loader_workers {best.workers}, pin_memory {str(best.pin_memory).lower()} "
        f"({best.rate:,.0f} images per second by one rank)" + (f"\nReport: {report.path}" if is_local() else "")
    )
    return LoadingChoice(best.workers, best.pin_memory, best.rate), report


def _show(event: Event) -> None:
    if isinstance(event, Printed):
        say(event.text)
