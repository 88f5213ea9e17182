"""Export of a trained model to files in several formats, each verified to reproduce the model's test measures."""

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from flyte_ddp.engine.job import Measured
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.export.card import Card, make_card
from flyte_ddp.export.settings import FILES, ExportJob, Written
from flyte_ddp.launch.launcher import run_alone
from flyte_ddp.report.console import Console, say
from flyte_ddp.report.mlflow_run import add_to_run
from flyte_ddp.whole_files import writing_to

# Names of functions, because their module imports torch
WRITE = "flyte_ddp.export.rank:write_formats"
MEASURE = "flyte_ddp.export.rank:measure_file"


class Exported(NamedTuple):
    """A model that was written, the measures of each format, and the model card."""

    written: Written
    formats: dict[str, Measured]
    card: Card


def export(asked: ExportJob) -> Exported:
    """Write a model in each format, and a model card, to a new folder, and verify the measures of each file.

    The weights and each file are measured on the test split, in float32 on the CPU, each in a process of its own. The
    weights' measures must agree with the training's, if those are known, and each file's with the weights'. Each file's
    main measure is printed. If something fails, the folder stays, incomplete.

    If MLFLOW_TRACKING_URI is set, the card is also added to the training's run in MLflow. If that fails, a warning is
    printed.

    Args:
        asked: the model, its job, the new folder, the options, and the measures of the training.

    Returns:
        The model's facts and measures, the measures of each file by its format, and the card.

    Raises:
        InputError: The loss is not finite, the training's measures do not agree, a format does not support the network,
            or the folder exists or cannot be written to.
        ReportedError: A file cannot be used, or gives other measures than the weights. RankError, which derives from
            this error, means that a process has failed, or was silent for options.timeout_seconds.
    """
    folder = Path(asked.folder)
    tolerance = asked.options.reported_tolerance
    with writing_to(folder.parent, "DDP_RUNS_DIR"):
        folder.mkdir()
    written: Written = _run(WRITE, asked, asked)
    loss = written.measured.measures.get("loss", 0.0)
    if not math.isfinite(loss):
        raise InputError(
            f"model_state must have a finite loss on the test split, got {loss}: it has diverged; use another"
        )
    difference = find_difference(asked.reported, written.measured.measures, tolerance)
    if difference:
        name, reported, measured = difference
        raise InputError(
            f"model_state gives {name} {measured:.6g} on the test split, but the training reported {reported:.6g} "
            f"(tolerance {tolerance:g}): use weights, settings and data of the same training, or raise "
            "reported_tolerance"
        )
    formats = {name: _verified(name, asked, written) for name in asked.options.names}
    card = make_card(asked, written, formats)
    with writing_to(folder, "DDP_RUNS_DIR"):
        (folder / "model.json").write_text(written.metadata.as_json(), encoding="utf-8")
        (folder / "model_card.md").write_text(card.markdown, encoding="utf-8")
        (folder / "model_card.html").write_text(card.page, encoding="utf-8")
        for file in (path for path in folder.rglob("*") if path.is_file()):
            shutil.copymode(folder / "model_card.md", file)  # safetensors makes the files that it writes private
    add_to_run(Path(asked.job.model_path), folder / "model_card.md", folder / "model_card.html")
    return Exported(written, formats, card)


def _verified(name: str, asked: ExportJob, written: Written) -> Measured:
    """Check that an exported file gives the measures of the weights; print its main measure, and return all of them.

    The file is opened and measured on the test split in a process of its own.

    Args:
        name: the file's format.
        asked: the job, the folder of the file, and the tolerance.
        written: the measures of the weights.

    Raises:
        ReportedError: The file cannot be used, or gives a measure that differs by more than options.tolerance.
            RankError, which derives from this error, means that the process has failed or was silent for too long.
    """
    file = FILES[name]
    tolerance = asked.options.tolerance
    outcome: Measured | str = _run(MEASURE, (asked.job, name, str(Path(asked.folder, file))), asked)
    if isinstance(outcome, str):
        raise ReportedError(f"{file} was written, but cannot be used: {outcome}: leave {name} out of formats")
    difference = find_difference(written.measured.measures, outcome.measures, tolerance)
    if difference:
        measure, expected, got = difference
        raise ReportedError(
            f"{file} gives {measure} {got:.6g} on the test split, but the model {expected:.6g} (tolerance "
            f"{tolerance:g}): leave {name} out of formats, or raise tolerance"
        )
    headline = written.metadata.headline
    say(f"{file}: {headline} {outcome.measures[headline]:.6g} on the test split, the same as the model")
    return outcome


def _run(target: str, argument: Any, asked: ExportJob) -> Any:
    """Run a function in a process of its own, on the CPU, because an exported program keeps its device."""
    return run_alone(target, argument, asked.options.timeout_seconds, Console(), root=asked.job.root)


def find_difference(
    expected: dict[str, float], measured: dict[str, float], tolerance: float
) -> tuple[str, float, float] | None:
    """Return the first expected measure that differs by more than the tolerance; None if none does.

    The allowed difference is `tolerance` itself for values up to 1, and `tolerance` times the value for larger ones.
    NaN equals NaN. `measured` may have more measures than `expected`.

    Returns:
        The measure's name, its expected value and its measured value.

    Raises:
        InputError: `measured` lacks a measure of `expected`.
    """
    for name, value in expected.items():
        if name not in measured:
            raise InputError(f"reported must name measures of the recipe, {', '.join(measured)}, got {name!r}")
        both_nan = math.isnan(value) and math.isnan(measured[name])
        if not (both_nan or math.isclose(value, measured[name], rel_tol=tolerance, abs_tol=tolerance)):
            return name, value, measured[name]
    return None
