"""Exports a trained model to files in several formats, each verified to reproduce the model's test measures."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.engine.job import Job, Measured, Subject, job_of
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.export import card
from flyte_ddp.export.settings import FILES, ExportJob, ExportOptions, VerifyJob, Written, check_formats
from flyte_ddp.launch.alone import run_alone
from flyte_ddp.report.console import open_console, say
from flyte_ddp.storage import temporary_beside, writing_to

WRITE, VERIFY = "flyte_ddp.export.rank:write", "flyte_ddp.export.rank:verify"  # names, because they import torch


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        subject: recipe, settings and data of its training.
        weights: the file of its weights.
        settings: those to record, as far as they are known; the subject's may be defaults.
        reported: measures of its training, by name; empty if unknown.
        training: see ModelMetadata.
    """

    subject: Subject
    weights: Path
    settings: dict[str, Any]
    reported: dict[str, float]
    training: dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """The model as written, the measures of each format, and the card."""

    written: Written
    formats: dict[str, Measured]
    card: card.Card


def export(source: Source, folder: Path, options: ExportOptions) -> Exported:
    """Writes, measures and describes a model in a new folder, which is created complete or not at all.

    The weights are measured first, in float32 on the CPU. If the training's measures are known, they must agree, which
    detects weights, settings or data of another training. Then each file is opened in a process of its own and must
    agree with the weights. In float32 the losses of two runtimes differ by about 1e-6; the default tolerance of 1e-4
    allows for that and for one borderline sample in 10,000, but a wrong weight or a missing operation exceeds it. For
    the training's measures it is 1e-3: on a GPU, torch computes convolutions in TF32, with 10 bits.
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
    job = job_of(source.subject, model_path=source.weights)
    asked = ExportJob(job, tuple(options.names), str(folder), source.settings, source.training)
    written: Written = _run(WRITE, asked, job, options)
    tolerance = options.reported_tolerance
    difference = differing(source.reported, written.measured.measures, tolerance)
    if difference:
        name, reported, found = difference
        raise InputError(
            f"model_state gives {name} {found:.6g} on the test split, but the training reported {reported:.6g} "
            f"(tolerance {tolerance:g}): use weights, settings and data of the same training, or raise "
            "reported_tolerance"
        )
    formats = {name: _verified(name, job, folder, written, options) for name in options.names}
    described = card.describe(source.subject, written, formats, source.reported, options)
    with writing_to(folder, "DDP_RUNS_DIR"):
        (folder / "model.json").write_text(written.metadata.as_json(), encoding="utf-8")
        (folder / "model_card.md").write_text(described.markdown, encoding="utf-8")
        (folder / "model_card.html").write_text(described.page, encoding="utf-8")
        for file in folder.iterdir():
            shutil.copymode(folder / "model_card.md", file)  # safetensors makes its files private
    return Exported(written, formats, described)


def _verified(name: str, job: Job, folder: Path, written: Written, options: ExportOptions) -> Measured:
    """The measures of the file; ReportedError if they differ from the model's."""
    file = FILES[name]
    found = _run(VERIFY, VerifyJob(job, name, str(folder / file), written.structure), job, options)
    if isinstance(found, str):
        raise ReportedError(f"{file} was written, but cannot be used: {found}: leave {name} out of formats")
    difference = differing(written.measured.measures, found.measures, options.tolerance)
    if difference:
        measure, expected, got = difference
        raise ReportedError(
            f"{file} gives {measure} {got:.6g} on the test split, but the model {expected:.6g} (tolerance "
            f"{options.tolerance:g}): leave {name} out of formats, or raise tolerance"
        )
    headline = written.metadata.headline
    say(f"{file}: {headline} {found.measures[headline]:.6g} on the test split, the same as the model")
    measured: Measured = found
    return measured


def _run(target: str, argument: Any, job: Job, options: ExportOptions) -> Any:
    """In a process of its own, on the CPU, because an exported program keeps its device."""
    console = open_console()
    try:
        return run_alone(target, argument, options.timeout_seconds, console, root=job.root)
    finally:
        console.close()


def differing(expected: dict[str, float], found: dict[str, float], tolerance: float) -> tuple[str, float, float] | None:
    """The first measure that differs, with both values; InputError if `found` lacks one."""
    for name, value in expected.items():
        if name not in found:
            raise InputError(f"reported must name measures of the recipe, {', '.join(found)}, got {name!r}")
        both_nan = math.isnan(value) and math.isnan(found[name])
        if not (both_nan or math.isclose(value, found[name], rel_tol=tolerance, abs_tol=tolerance)):
            return name, value, found[name]
    return None
