"""The set-up that every workflow file calls first, so that pyflyte reads our inputs and ships our code correctly."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
from flytekit.models.literals import Literal

import flyte_ddp
from flyte_ddp.attempt.options import explain_settings
from flyte_ddp.code.code_version import is_installed
from flyte_ddp.code.user_code import loaded_files
from flyte_ddp.errors import ReportedError
from flyte_ddp.fields import Settings
from flyte_ddp.flyte1.flytekit_compat import get_python_type, on_cache_hit, read_json_inputs
from flyte_ddp.flyte1.inputs import explain_missing_paths
from flyte_ddp.reading import read_settings
from flyte_ddp.report.console import say_last, show_output


def set_up_pyflyte() -> None:
    """Patch pyflyte for this library. A second call does no harm.

    pyflyte then explains wrong settings, unknown options and missing paths, shows settings in --help, prints the
    library's messages, says when a training is taken from the local cache, and sends the whole package to a cluster.

    Raises:
        ReportedError: the module flytekit is Flyte 2's shim, flyte_migrate.
    """
    refuse_shim()
    show_output()
    read_json_inputs(Settings, read_settings)
    explain_settings(get_python_type)
    explain_missing_paths()
    on_cache_hit(print_cached)
    ship_whole_package()


def refuse_shim() -> None:
    """Raise ReportedError if the module flytekit is flyte_migrate, Flyte 2's shim with flytekit's names."""
    if "flyte_migrate" in sys.modules:
        raise ReportedError(
            "this package cannot be run by Flyte 2's flyte_migrate: it drops the cache policies that we rely on, so "
            "that a model trained by older code would be returned. Register with flytekit 1.16 (pyflyte)"
        )


def ship_whole_package() -> None:
    """Ship all modules of this package, even those of the ranks, unless it is installed: then the image has it."""
    root = Path(flyte_ddp.__path__[0])
    if not is_installed(str(root)):
        ship(map(str, sorted(root.rglob("*.py"))))


def ship(files: Iterable[str]) -> None:
    """Make `pyflyte run --remote` send these files, too, without importing them.

    Without `--copy all`, the pod would otherwise run the files of its image in place of these.

    Args:
        files: absolute paths. pyflyte sends files that are already imported anyway.
    """
    # pyflyte sends the __file__ of each entry in sys.modules that is below the project's root. So each file gets an
    # entry, which is no real module: importing the files of the ranks would import torch.
    imported = set(loaded_files().values())  # pyflyte sends imported files anyway, and would send them twice
    for file in files:
        name = f"{file} (file)"
        sys.modules.pop(name, None)  # of an earlier call: the file may have been imported since
        if file not in imported:
            sys.modules[name] = _File(name)
            sys.modules[name].__file__ = file


class _File(ModuleType):
    """A module that was not imported: loaded_files counts only what has Python's own type of modules."""


# --- cached trainings ---

TRAIN_AGAIN = "To train again, put --overwrite-cache before the file: pyflyte run --overwrite-cache FILE WORKFLOW …"


def print_cached(outputs: Mapping[str, Literal]) -> None:
    """Print that a training was taken from the local cache, with its measures, its files and how to train again.

    Nothing is printed for the outputs of other tasks, and for files that are not on this machine.

    Args:
        outputs: the outputs of a task, by name.
    """
    if not outputs.keys() >= {"model_state", "summary", "report"}:
        return
    model, summary, report = (outputs[name].scalar for name in ("model_state", "summary", "report"))
    if not (model and model.blob and summary and summary.binary and report and report.blob):
        return  # another task's outputs of these names, as below
    model, report = model.blob.uri, report.blob.uri
    summary = msgpack.loads(summary.binary.value) if summary.binary.tag == "msgpack" else None
    if not isinstance(summary, dict) or "world_size" not in summary or not report.startswith("/"):
        return
    ranks = f"{summary['world_size']} rank" + "s" * (summary["world_size"] != 1)
    lines = [
        ("Cached", f"trained before on {ranks} with the same inputs, so nothing was trained now. {TRAIN_AGAIN}"),
        ("Tested", _measured(summary)),
        ("Model", model),
        ("Report", report),
        ("Next", f"python3 -m webbrowser {Path(report).as_uri()}"),
    ]
    say_last("\n" + "\n".join(f"{label + ':':<9}{text}" for label, text in lines))


def _measured(summary: Mapping[str, Any]) -> str:
    """Format a summary's measures of the test samples on one line. An image classifier's summary has no `measures`."""
    own = {name.removeprefix("test_"): summary[name] for name in ("accuracy", "test_loss") if name in summary}
    return ", ".join(f"{name} {value:.4g}" for name, value in (summary.get("measures") or own).items())
