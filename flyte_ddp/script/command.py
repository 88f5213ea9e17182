"""The command `python -m flyte_ddp script --nproc 2 train.py ARGUMENTS`, which runs a script on this machine."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from flyte_ddp.attempt.logs import Logs
from flyte_ddp.attempt.registration import check_variables
from flyte_ddp.code.user_code import find_script
from flyte_ddp.engine.job import OUTPUT, job_in
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.report.console import say_summary
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.observers import Observers
from flyte_ddp.report.record import RunFinished
from flyte_ddp.script.job import RANKS
from flyte_ddp.script.training import CHECKPOINT, describe_script, launch, make_script_job
from flyte_ddp.settings import TRACKING, RunOptions
from flyte_ddp.training import describe_run, locked_output
from flyte_ddp.whole_files import absolute, writing_to

TIMEOUT = RunOptions().write_timeout_seconds


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc", type=click.IntRange(0, 1024), default=0, help="Ranks; 0 is one per visible GPU, else two.")
@click.option("--output", type=Path, default="trained", show_default=True, help="The folder for all that is written.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(1, 86400),
    default=TIMEOUT,
    show_default=True,
    help="How long the ranks may call no collective and print nothing before they count as hung.",
)
@click.option("--tracking", type=click.Choice(TRACKING), default="auto", show_default=True, help="The tracker.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def script(nproc: int, output: Path, timeout_seconds: float, tracking: str, script: str, arguments: Any) -> None:
    """Run a script that torchrun could run, on this machine.

    What follows SCRIPT are the script's own arguments. The script finds the folder for its checkpoints,
    OUTPUT/checkpoints, as $DDP_CHECKPOINT_DIR. A script that resumes from its own checkpoints under torchrun does so
    here, too. Lines of JSON that the script appends to $DDP_EVENTS, such as {"step": 10, "loss": 1.2}, are figures of
    the report and trackers.
    """
    check_variables()
    started = time.time()
    code = find_script(absolute(script, "SCRIPT"), ranks=[RANKS])
    world = choose_world("auto", nproc, sys.maxsize)
    options = RunOptions(
        nproc=nproc,
        tracking=tracking,
        write_timeout_seconds=timeout_seconds,
        start_timeout_seconds=timeout_seconds,
    )
    folder = absolute(output, OUTPUT)
    checkpoints = folder / CHECKPOINT
    with writing_to(folder, "--output"):
        checkpoints.mkdir(parents=True, exist_ok=True)
    job = job_in(folder, describe_script(code, arguments), options)
    report = folder / "report.html"
    with locked_output(folder), tempfile.TemporaryDirectory() as ended:
        logs = Logs(folder, url="")
        info = describe_run(folder, job, goodput := Goodput(started))
        with Observers(info, goodput, logs, page=report) as observers:
            results = launch(make_script_job(job, code, arguments, checkpoints, ended), world, observers)
            goodput.wait(time.time())
            observers.end(RunFinished.of(results, folder, goodput))
        say_summary(observers.record, Path(job.model_path), report, show_paths=True)
