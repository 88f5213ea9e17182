"""The timing study of inference as Flyte tasks."""

import csv
import dataclasses
import os
from typing import NamedTuple

from flytekit import task
from flytekit.types.file import CSVFile, FlyteFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.data.prepared import prepared
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.outputs import output_file, output_page
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.prepare import PreparedDataset, resolve_name
from flyte_ddp.flyte1.resources import small_resources, training_resources
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World, choose_world, visible_gpus
from flyte_ddp.report.console import Console, say, say_last
from flyte_ddp.timing.measurement import DATA_PARALLEL, ONE_DEVICE, PROCESSES, Measurement, TimingJob, TimingOptions
from flyte_ddp.timing.page import timing_article

TIMER = "flyte_ddp.timing.rank:run"  # a name, because importing it would import torch


class TimingOutputs(NamedTuple):
    """The outputs of the timing study.

    Attributes:
        measurements: a line for each, see flyte_ddp.timing.measurement.Measurement.
        report: curves and a table, in one file.
    """

    measurements: CSVFile
    report: FlyteFile["html"]  # noqa: F821


@task(**small_resources())
@platform_errors(platform)
def check_timing(options: TimingOptions) -> str:
    """The name of the dataset; a local run finds out here whether this machine can run that many processes."""
    if is_local():
        processes_of(options)
    return resolve_name(options.dataset)


@task(retries=2, enable_deck=True, deck_fields=(), **training_resources())
@platform_errors(platform)
def time_inference(data: PreparedDataset, options: TimingOptions) -> TimingOutputs:
    """Times all methods with each batch size, options.repeats times; never cached, because timings vary."""
    check_gpus(visible_gpus())
    with run_folder(platform, "inference-timing") as folder:
        description = prepared.verify(data.download())
        load = os.getloadavg()[0]
        timings = measure_all(data.download(), options)
        measurements = folder / "measurements.csv"
        with open(measurements, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Measurement._fields)
            writer.writerows(timings)
        report = output_page(folder, "Timing of inference", timing_article(timings, load, description, options))
    if is_local():
        say_last(f"\nMeasurements: {measurements}\nReport:       {report.path}")
    return TimingOutputs(output_file(measurements, CSVFile), report)


def processes_of(options: TimingOptions) -> World:
    return choose_world("auto", options.nproc, batch_size=1024)  # the largest nproc: batches are not shared out


def measure_all(data: str, options: TimingOptions) -> list[Measurement]:
    """Methods take turns going first, so that a machine that becomes faster or slower favours none."""
    many = processes_of(options)
    alone = dataclasses.replace(many, size=1, local_size=1)
    timings: list[Measurement] = []
    for repeat in range(options.repeats):
        turns = [(alone, (ONE_DEVICE, DATA_PARALLEL)), (many, (PROCESSES,))]
        for world, methods in turns[:: -1 if repeat % 2 else 1]:
            job = TimingJob(data, methods[:: -1 if repeat % 2 else 1], options)
            timings += launcher.launch(TIMER, world, job, options.timeout_seconds, Console())[0]
        best = max(timings, key=lambda one: one.images_per_second)
        say(
            f"Measured {repeat + 1} of {options.repeats} times; most so far: {best.images_per_second:,.0f} images/s by "
            f"{best.method}, {best.batch_size} images a batch"
        )
    return timings
