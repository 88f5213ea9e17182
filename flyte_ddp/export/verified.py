"""A trained model as files of several formats, each of which has given the test measures of the model again."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from flyte_ddp.engine.job import Job, Measured, Subject, job_of
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.export import card
from flyte_ddp.export.settings import FILES, ExportJob, ExportOptions, VerifyJob, Written, check_formats
from flyte_ddp.launch.alone import run_alone
from flyte_ddp.model_metadata import path_beside
from flyte_ddp.report.console import open_console, say
from flyte_ddp.settings import RunOptions
from flyte_ddp.storage import temporary_beside, writing_to

WRITE, VERIFY = "flyte_ddp.export.rank:write", "flyte_ddp.export.rank:verify"  # names, because they import torch


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        subject: recipe, settings and data of its training.
        weights: its file.
        settings: those to be stated, as far as they are known; the subject's may be defaults.
        reported: measures of its training, by name; empty where they are not known.
        training: as ModelMetadata has it.
    """

    subject: Subject
    weights: Path
    settings: Dict[str, Any]
    reported: Dict[str, float]
    training: Dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """What has been written: of the model itself, and of each format."""

    written: Written
    formats: Dict[str, Measured]
    card: card.Card


def export(source: Source, folder: Path, options: ExportOptions) -> Exported:
    """Writes, measures and describes a model in a folder that appears whole or not at all; there must be none yet.

    The model is first measured from its weights, in float32 on the CPU. If the training's own measures are known, the
    two have to agree, which finds weights, settings or data of another training. Then each file is opened in a process
    of its own and has to agree with the weights. Two runtimes' float32 differ by some 1e-6 in the loss; 1e-4, the
    default, leaves room for that, and for one sample in 10,000 that was on the brink, while a wrong weight or a lost
    operation shows. A training's measures get 1e-3: on a GPU torch's convolutions are in TF32, of 10 bits.
    """
    check_formats(options)
    beside = temporary_beside(folder)
    with writing_to(folder.parent, "DDP_RUNS_DIR"):
        beside.mkdir()
    try:
        exported = _export(source, beside, options)
        with writing_to(folder.parent, "DDP_RUNS_DIR"):
            for file in beside.iterdir():
                with open(file, "rb") as content:
                    os.fsync(content.fileno())
            os.rename(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return exported


def _export(source: Source, folder: Path, options: ExportOptions) -> Exported:
    job = job_of(source.subject, RunOptions(), model_path=str(source.weights))
    asked = ExportJob(job, tuple(options.names), str(folder), source.settings, source.training)
    written: Written = _run(WRITE, asked, job, options)
    tolerance = options.reported_tolerance
    difference = differing(source.reported, written.measured.measures, tolerance)
    if difference:
        name, reported, found = difference
        raise InputError(
            f"model_state gives {name} {found:.6g} on the test split, the training reported {reported:.6g}, and they "
            f"may differ by {tolerance:g}: give the weights, settings and data of one training, or raise "
            "reported_tolerance"
        )
    formats = {name: _verified(name, job, folder, written, options) for name in options.names}
    described = card.describe(source.subject, written, formats, source.reported, options)
    with writing_to(folder, "DDP_RUNS_DIR"):
        path_beside(folder / "model").write_text(written.metadata.as_json(), encoding="utf-8")
        (folder / "model_card.md").write_text(described.markdown, encoding="utf-8")
        (folder / "model_card.html").write_text(described.page, encoding="utf-8")
        for file in folder.iterdir():
            shutil.copymode(folder / "model_card.md", file)  # safetensors' are its writer's alone
    return Exported(written, formats, described)


def _verified(name: str, job: Job, folder: Path, written: Written, options: ExportOptions) -> Measured:
    """What the file gives; ReportedError where that is not what the model gives."""
    file = FILES[name]
    found = _run(VERIFY, VerifyJob(job, name, str(folder / file), written.structure), job, options)
    if isinstance(found, str):
        raise ReportedError(f"{file} was written, but cannot be used: {found}: leave {name} out of formats")
    difference = differing(written.measured.measures, found.measures, options.tolerance)
    if difference:
        measure, expected, got = difference
        raise ReportedError(
            f"{file} gives {measure} {got:.6g} on the test split, the model {expected:.6g}, and they may differ by "
            f"{options.tolerance:g}: leave {name} out of formats, or raise tolerance"
        )
    headline = written.metadata.headline
    say(f"{file}: {headline} {found.measures[headline]:.6g} on the test split, as the model itself")
    measured: Measured = found
    return measured


def _run(target: str, argument: Any, job: Job, options: ExportOptions) -> Any:
    """In a process of its own, on the CPU, for a program keeps the device that it was made on."""
    console = open_console()
    try:
        return run_alone(target, argument, options.timeout_seconds, console, root=job.root)
    finally:
        console.close()


def differing(
    expected: Dict[str, float], found: Dict[str, float], tolerance: float
) -> Optional[Tuple[str, float, float]]:
    """The first measure that differs, with both values; InputError for one that there is not."""
    for name, value in expected.items():
        if name not in found:
            raise InputError(f"reported must name measures of the recipe, {', '.join(found)}, got {name!r}")
        both_nan = math.isnan(value) and math.isnan(found[name])
        if not (both_nan or math.isclose(value, found[name], rel_tol=tolerance, abs_tol=tolerance)):
            return name, value, found[name]
    return None
