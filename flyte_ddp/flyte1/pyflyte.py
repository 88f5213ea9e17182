"""The set-up that every workflow file calls first, so that pyflyte reads our inputs and ships our code correctly."""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import flyte_ddp
from flyte_ddp.attempt.options import describe_settings, explain_unknown_options
from flyte_ddp.code.code_version import is_installed
from flyte_ddp.code.user_code import loaded_files
from flyte_ddp.errors import ReportedError
from flyte_ddp.flyte1.cached import explain_cached_trainings
from flyte_ddp.flyte1.flytekit_compat import type_of
from flyte_ddp.flyte1.inputs import explain_missing_paths, explain_unreadable_settings
from flyte_ddp.report.console import show_output


def set_up_pyflyte() -> None:
    """Set up pyflyte. A second call does no harm. Raises ReportedError under Flyte 2's shim."""
    refuse_shim()
    show_output()
    explain_unreadable_settings()
    explain_unknown_options(type_of)
    describe_settings(type_of)
    explain_missing_paths()
    explain_cached_trainings()
    ship_whole_package()


def refuse_shim() -> None:
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
    """Make `pyflyte run --remote` send these files (absolute paths) without importing them.

    The ranks' modules import torch. pyflyte sends the __file__ of everything in sys.modules that is below the project's
    root.
    """
    imported = set(loaded_files().values())  # imported files would be sent twice
    for file in files:
        name = f"{file} (file)"
        sys.modules.pop(name, None)  # the file may have been imported since
        if file not in imported:
            sys.modules[name] = _File(name)
            sys.modules[name].__file__ = file


class _File(ModuleType):
    """A type of module that loaded_files does not count as imported."""
